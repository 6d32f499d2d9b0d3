"""What chooses a request's tokens: made here for both workers, so that the draft's law is the target's."""

from __future__ import annotations

from vidspec_models.grammar import GrammarMask
from vidspec_models.inputs import Prompt
from vidspec_models.logits_processors import processors_of
from vidspec_models.request import GenerationRequest
from vidspec_models.sampling import CoupledSampler
from vidspec_models.video_lm import VideoLM


def sampler_of(
    request: GenerationRequest, prompt: Prompt, model: VideoLM, grammar: GrammarMask | None = None
) -> CoupledSampler:
    """`prompt` is the whole of it, as its model has it, whatever of its video is left out later."""
    found = processors_of(request, prompt.ids, request.end_ids(model.stop_ids))
    return CoupledSampler(request.sampling, found, constraint=grammar)
