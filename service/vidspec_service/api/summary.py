"""The facts told at the end of an answer: usage, video, speculation, timings. Pure."""

from __future__ import annotations

from vidspec_service.api.answers import (
    CompletionTokensDetails,
    PromptTokensDetails,
    SpeculationFacts,
    Summary,
    Timings,
    Usage,
    VideoFacts,
)
from vidspec_service.api.stopwatch import Stopwatch
from vidspec_service.decoding.selection import Clip
from vidspec_service.engine.types import Finished, SpeculationStats, Started

_DIGITS = 6  # microseconds; more is noise


def summarise(video: VideoFacts, started: Started, finished: Finished, watch: Stopwatch) -> Summary:
    """Everything a complete answer says besides its text."""
    return Summary(
        usage=_usage(started, finished),
        video=video,
        speculation=_speculation(finished.speculation),
        timings=Timings(
            queue_s=round(watch.turn_s + finished.queue_s, _DIGITS),
            decode_s=round(watch.decode_s, _DIGITS),
            prefill_s=round(finished.prefill_s, _DIGITS),
            time_to_first_token_s=round(watch.time_to_first_token_s, _DIGITS),
            time_per_output_token_s=round(watch.time_per_output_token_s, _DIGITS),
        ),
    )


def _usage(started: Started, finished: Finished) -> Usage:
    stats = finished.speculation
    return Usage(
        prompt_tokens=started.prompt_tokens,
        completion_tokens=finished.completion_tokens,
        total_tokens=started.prompt_tokens + finished.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            video_tokens=started.video_tokens, cached_tokens=started.cached_tokens
        ),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=stats.num_accepted_tokens,
            rejected_prediction_tokens=stats.num_draft_tokens - stats.num_accepted_tokens,
        ),
    )


def video_facts(video_id: str, clip: Clip) -> VideoFacts:
    """What is said of a clip; its frames may go."""
    return VideoFacts(
        id=video_id,
        duration_s=round(clip.video.duration_s, _DIGITS),
        num_frames=len(clip.timestamps_s),
        timestamps_s=[round(timestamp, _DIGITS) for timestamp in clip.timestamps_s],
        warnings=list(clip.warnings),
    )


def _speculation(stats: SpeculationStats) -> SpeculationFacts:
    return SpeculationFacts(
        mode=stats.mode,
        acceptance_rate=round(stats.acceptance_rate, _DIGITS),
        mean_accepted_tokens=round(stats.mean_accepted_tokens, _DIGITS),
        draft_video_tokens=stats.draft_video_tokens,
    )
