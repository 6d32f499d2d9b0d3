"""Engine types to model inputs, inside a worker."""

from __future__ import annotations

from collections.abc import Sequence

from vidspec_models.encoded_videos import EncodedVideos
from vidspec_models.errors import ContextOverflow
from vidspec_models.inputs import Prompt, Turn, Video
from vidspec_models.token_sampling import SamplingLaw
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.messages import Generate
from vidspec_service.engine.payload import read_payload
from vidspec_service.engine.types import ChatMessage, VideoInput


def prepare_prompt(model: VideoLM, payload_fd: int, encoded: EncodedVideos) -> Prompt:
    """Read a request's payload (closing it) and let the model turn it into prompt rows."""
    return model.prepare(*model_inputs(*read_payload(payload_fd)), encoded)


def model_inputs(messages: Sequence[ChatMessage], videos: Sequence[VideoInput]) -> tuple[list[Turn], list[Video]]:
    """The same conversation and clips in the model package's words."""
    turns = [Turn(role=message.role, text=message.text, num_videos=message.num_videos) for message in messages]
    clips = [
        Video(
            frames=video.frames,
            source_indices=video.source_indices,
            source_fps=video.source_fps,
            source_num_frames=video.source_num_frames,
            duration_s=video.duration_s,
            key=video.key,
        )
        for video in videos
    ]
    return turns, clips


def sampling_law(request: Generate) -> SamplingLaw:
    """The law that both workers draw from."""
    return SamplingLaw(temperature=request.temperature, top_p=request.top_p, top_k=request.top_k, seed=request.seed)


def answer_limit(request: Generate, prompt: Prompt, context_length: int, default: int) -> int:
    """How long the answer may get; raises ContextOverflow if what the request asks for does not fit."""
    room = context_length - prompt.context_used
    wanted = request.max_tokens if request.max_tokens is not None else 1
    if room < wanted:
        raise ContextOverflow(
            f"the prompt has {prompt.num_tokens} tokens ({prompt.num_video_tokens} of them video) and "
            f"max_tokens is {wanted}, together more than the context of {context_length}; "
            "ask for fewer frames or fewer tokens"
        )
    return request.max_tokens if request.max_tokens is not None else min(default, room)
