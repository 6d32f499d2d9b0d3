"""What a worker is told of a request: ids and numbers; text and frames lie in its payload."""

from __future__ import annotations

from vidspec_service.engine.messages import Generate
from vidspec_service.engine.types import GenerationRequest, SpeculationMode


def generate_message(request: GenerationRequest, mode: SpeculationMode) -> Generate:
    """`mode` is what the request's choice, the server's and the draft's absence come to."""
    return Generate(
        request_id=request.request_id,
        max_tokens=request.max_tokens,
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        top_k=request.sampling.top_k,
        seed=request.sampling.seed,
        speculation=mode.value,
        compression=request.compression.value,
    )
