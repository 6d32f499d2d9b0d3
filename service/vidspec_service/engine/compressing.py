"""TargetCompression: what a request's `compression` does to its prompt and to its decoding, on the target alone.

The draft reads the uncompressed prompt: whatever it sees can change the speed only.
"""

from __future__ import annotations

from dataclasses import replace

from vidspec_models.compression.dycoke import DyCoke
from vidspec_models.compression.merging import merge_prompt
from vidspec_models.compression.pruner import KVPruner
from vidspec_models.inputs import Prompt
from vidspec_service.engine.messages import Generate
from vidspec_service.engine.types import Compression


class TargetCompression:
    """The server's parameters; whether they apply is each request's choice."""

    def __init__(self, dycoke: DyCoke, num_layers: int) -> None:
        self._dycoke = dycoke
        self._num_layers = num_layers

    def prompt(self, request: Generate, prompt: Prompt) -> Prompt:
        """What is prefilled, now and whenever the request is resumed.

        Nobody else may use its cache: rows that are hidden while it decodes do not stay in their places.
        """
        if not self._applies(request):
            return prompt
        return replace(merge_prompt(prompt, self._dycoke.merge_ratio), identity=None)

    def pruner(self, request: Generate, prompt: Prompt) -> KVPruner | None:
        """What hides rows of that prompt while the request decodes."""
        return KVPruner.of(prompt, self._dycoke, self._num_layers) if self._applies(request) else None

    @staticmethod
    def _applies(request: Generate) -> bool:
        return Compression(request.compression) is Compression.DYCOKE
