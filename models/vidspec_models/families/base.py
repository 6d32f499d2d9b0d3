"""Family: the few things in which video-LLM architectures differ, as the engine sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vidspec_models.decoder import Decoder
from vidspec_models.inputs import EncodedVideo, Prompt, Turn, Video


class Family(Protocol):
    """One architecture. Stateless: everything it needs comes in, everything it makes goes out."""

    def language_model(self, model: Any) -> Any:
        """The transformers text decoder (with `layers`, `norm`, `embed_tokens`, `rotary_emb`)."""
        ...

    def default_num_frames(self, processor: Any) -> int:
        """Frames to sample when the caller names neither fps nor a number."""
        ...

    def video_arguments(self, processor: Any) -> Mapping[str, Any]:
        """What the video processor must be told besides the frames and their metadata."""
        ...

    def num_video_tokens(self, model: Any, processor: Any, video: Video) -> int:
        """Prompt rows that one video takes at least, known before any of its frames is processed."""
        ...

    def encode(self, model: Any, processor: Any, video: Video) -> EncodedVideo:
        """Process the frames and run the vision tower: what is the same in every conversation about the video."""
        ...

    def prepare(
        self, model: Any, processor: Any, decoder: Decoder, turns: Sequence[Turn], videos: Sequence[EncodedVideo]
    ) -> Prompt:
        """Template, tokenise and merge the videos' features into the prompt's embeddings."""
        ...
