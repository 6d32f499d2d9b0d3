"""PlainFamily: what the families share whose frames are images of one size and whose positions count rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vidspec_models.decoder import Decoder
from vidspec_models.families.encoding import plain_prompt, tokenised
from vidspec_models.inputs import EncodedVideo, Prompt, Turn


class PlainFamily:
    """Frames to sample where the checkpoint does not say; the name of the placeholder's id in its configuration."""

    num_frames: int
    placeholder = "video_token_id"

    def language_model(self, model: Any) -> Any:
        return model.model.language_model

    def default_num_frames(self, processor: Any) -> int:
        return int(processor.video_processor.num_frames or self.num_frames)

    def video_arguments(self, processor: Any) -> Mapping[str, Any]:
        return {}

    def prepare(
        self, model: Any, processor: Any, decoder: Decoder, turns: Sequence[Turn], videos: Sequence[EncodedVideo]
    ) -> Prompt:
        ids = tokenised(processor, turns, videos).to(decoder.embedding.device)
        return plain_prompt(decoder, ids, ids == getattr(model.config, self.placeholder), videos)
