"""From what the child processes said to the lines of the report. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from vidspec_service.bench.compression.messages import Described
from vidspec_service.bench.compression.options import Configuration, Method
from vidspec_service.bench.compression.scoring import Score

_RESAMPLES = 2000
_TAIL = 0.025


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One configuration; clips in the same order everywhere."""

    configuration: Configuration
    captions: Sequence[Described]
    questions: Sequence[Score]

    def scores(self) -> list[Score]:
        """Per clip, questions and caption facts together."""
        return [caption.score + asked for caption, asked in zip(self.captions, self.questions, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionResult:
    """One line. Times are of captions: medians over clips, but per token total time over total tokens."""

    compression: str
    frames: int
    merge_ratio: float
    hide_ratio: float
    layer: int
    accuracy: float  # of questions and caption facts together
    accuracy_change: float | None  # against `none` at as many frames
    accuracy_change_interval: tuple[float, float] | None  # 95 %, bootstrap over clips, each with both answers
    question_accuracy: float
    caption_fact_accuracy: float
    captions_all_right: float
    num_scored: int
    prepare_s: float
    prefill_s: float
    time_per_output_token_s: float
    request_s: float  # prepare, prefill and a caption of mean length over all configurations at as many frames
    speedup: float | None  # of request_s
    kv_bytes: int
    kv_ratio: float | None  # how many times less than `none`
    kv_attended_bytes: int
    peak_rss_bytes: int
    prompt_tokens: float
    video_tokens: float
    output_tokens: float


def results(measured: Sequence[Measured]) -> tuple[CompressionResult, ...]:
    """All lines, in the given order."""
    bases = {one.configuration.frames: one for one in measured if one.configuration.method is Method.NONE}
    lengths = {
        frames: fmean(
            caption.num_tokens for one in measured if one.configuration.frames == frames for caption in one.captions
        )
        for frames in {one.configuration.frames for one in measured}
    }
    return tuple(_result(one, bases, lengths[one.configuration.frames]) for one in measured)


def _result(one: Measured, bases: Mapping[int, Measured], length: float) -> CompressionResult:
    configuration, captions = one.configuration, one.captions
    base = bases.get(configuration.frames)
    base = None if base is one else base
    total = sum(one.scores(), Score())
    change, interval = (None, None) if base is None else accuracy_change(one.scores(), base.scores())
    kv_bytes = round(median(caption.stored_bytes for caption in captions))
    request_s = _request_s(captions, length)
    return CompressionResult(
        compression=configuration.label,
        frames=configuration.frames,
        merge_ratio=configuration.dycoke.merge_ratio,
        hide_ratio=configuration.dycoke.hide_ratio,
        layer=configuration.dycoke.layer,
        accuracy=total.rate,
        accuracy_change=change,
        accuracy_change_interval=interval,
        question_accuracy=sum(one.questions, Score()).rate,
        caption_fact_accuracy=sum((caption.score for caption in captions), Score()).rate,
        captions_all_right=fmean(caption.is_all_right for caption in captions),
        num_scored=total.asked,
        prepare_s=median(caption.prepare_s for caption in captions),
        prefill_s=median(caption.prefill_s for caption in captions),
        time_per_output_token_s=_token_s(captions),
        request_s=request_s,
        speedup=None if base is None else _request_s(base.captions, length) / request_s,
        kv_bytes=kv_bytes,
        kv_ratio=None if base is None else median(caption.stored_bytes for caption in base.captions) / kv_bytes,
        kv_attended_bytes=round(median(caption.attended_bytes for caption in captions)),
        peak_rss_bytes=max(caption.peak_bytes for caption in captions),
        prompt_tokens=fmean(caption.prompt_tokens for caption in captions),
        video_tokens=fmean(caption.video_tokens for caption in captions),
        output_tokens=fmean(caption.num_tokens for caption in captions),
    )


def accuracy_change(ours: Sequence[Score], base: Sequence[Score]) -> tuple[float, tuple[float, float] | None]:
    """Difference of the rates over all clips, and the middle 95 % of it when clips are drawn again (two at least)."""
    columns = np.array(
        [(a.right, a.asked, b.right, b.asked) for a, b in zip(ours, base, strict=True)], dtype=np.float64
    )
    difference = _difference(columns.sum(0))
    if len(columns) < 2:
        return float(difference), None
    drawn = np.random.default_rng(0).integers(len(columns), size=(_RESAMPLES, len(columns)))
    low, high = np.quantile(_difference(columns[drawn].sum(axis=1).T), (_TAIL, 1 - _TAIL))
    return float(difference), (float(low), float(high))


def _difference(
    sums: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    our_right, our_asked, base_right, base_asked = sums
    difference: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = our_right / our_asked - base_right / base_asked
    return difference


def _token_s(captions: Sequence[Described]) -> float:
    steps = sum(caption.num_tokens - 1 for caption in captions)
    return sum(caption.decode_s for caption in captions) / steps if steps else 0.0


def _request_s(captions: Sequence[Described], length: float) -> float:
    before = median(caption.prepare_s + caption.prefill_s for caption in captions)
    return before + _token_s(captions) * (length - 1)
