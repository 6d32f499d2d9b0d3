"""VideoLM: the engine's interface to a loaded model: prepare a prompt, prefill it in chunks, step many requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vidspec_models.backends.cuda.stream import SideStream
from vidspec_models.compression.pruner import KVPruner
from vidspec_models.compression.token_choice import TokenChoice
from vidspec_models.decoder.decoder import Decoder, QueryObserver, Segment
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.encoder_cache import EncodedVideo, EncoderCache, joined
from vidspec_models.errors import ContextOverflow
from vidspec_models.families.base import Family
from vidspec_models.families.conversation import check_text_fits, tool_format
from vidspec_models.grammar import GrammarError, GrammarMask, Grammars
from vidspec_models.inputs import Prompt
from vidspec_models.request import DEFAULT_TEMPLATE, ChatTemplate, ToolFormat, TowerRows, Turn, Video
from vidspec_models.sampling import CoupledSampler, Guess, guess_all, sampling_defaults

if TYPE_CHECKING:
    from vidspec_models.backends.cpu.step import CpuStep
    from vidspec_models.backends.cuda.step import CudaStep

_FILLED = 0.9  # share of the context that videos may fill with an advised ratio: words and answer need room, too


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """New rows of one sequence: `ids` follow the cache's rows; the first one has rotary position `position`."""

    cache: KVCache
    ids: Sequence[int]
    position: int
    pruner: KVPruner | None = None  # DyCoke on the target; then `ids` are at most the pruner's `num_rows_left`


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoHandling:
    """Options for handling a prompt's videos."""

    choice: TokenChoice | None = None  # which of the videos' rows the prompt keeps; None: all
    hands_on_tower: bool = False  # return the tower's output with the prompt, unless a video's features were cached
    is_wanted: Callable[[], bool] = lambda: True  # asked between two parts of a long video
    context_length: int | None = None  # limit for prompt and answer in tokens; None: the model's context


AS_THEY_ARE = VideoHandling()


class VideoLM:
    """One model, on one device or on several. Not thread-safe; keeps no state between calls except its weights."""

    def __init__(
        self, family: Family, decoder: Decoder, stop_ids: frozenset[int], step: CpuStep | CudaStep | None = None
    ) -> None:
        """`step` computes decoding steps instead of the decoder, and can do several steps in one call."""
        self.family = family
        processor = self._processor = family.processor
        self.decoder = decoder
        self._step = step or decoder.step
        self._runner = step
        self.has_kernels = step is not None  # own kernels for decoding steps; torch computes the rest
        self.stop_ids = stop_ids
        # Number of ids that the tokenizer has; None, meaning all, without a tokenizer.
        self._num_tokens = None if processor is None else num_ids(processor.tokenizer)
        self._grammars = self._num_tokens and Grammars(processor.tokenizer, stop_ids, self._num_tokens)
        device = decoder.embedding.device
        self._side = SideStream(device) if device.type == "cuda" else None

    @property
    def context_length(self) -> int:
        return self.decoder.context_length

    @property
    def is_chunk_invariant(self) -> bool:
        """Whether a prompt's rows have the same bits however the prompt is cut into chunks."""
        return self.decoder.prompts.is_chunk_invariant

    @property
    def default_sampling(self) -> dict[str, float]:
        """The checkpoint's own defaults for fields of SamplingParams that a request leaves out."""
        return sampling_defaults(getattr(self.family.model, "generation_config", None))

    @property
    def tool_format(self) -> ToolFormat:
        """How the checkpoint's chat template handles tools."""
        processor = self._processor
        return tool_format(processor.chat_template, processor.tokenizer.get_vocab()) if processor else ToolFormat.NONE

    @torch.inference_mode()
    def encode(
        self, video: Video, choice: TokenChoice | None = None, is_wanted: Callable[[], bool] = lambda: True
    ) -> EncodedVideo:
        """Run the vision tower, or continue from an equal tower's output in `video`; keep only the chosen rows.

        Raises ModelError if the tower shall choose and cannot, and NotWanted if `is_wanted` returns False between two
        parts of the video.
        """
        with self.decoder.cores:
            if choice is not None and choice.choose is None and len(video.frames) > 1:
                return self.family.encode_merged(video, choice.ratio)
            parts = self.family.encode_parts(video, is_wanted)
            return joined(list(parts)) if choice is None else choice.in_stretches(parts, self.context_length)

    def grammar_mask(self, grammar: str) -> GrammarMask:
        """The mask that makes one answer follow a grammar; raises GrammarError. For one thread at a time."""
        if not self._grammars:
            raise GrammarError("this model has no tokenizer to write a grammar's text with")
        return self._grammars.mask(grammar)

    @torch.inference_mode()
    def prepare(
        self,
        turns: Sequence[Turn],
        videos: Sequence[Video],
        encoded: EncoderCache | None = None,
        template: ChatTemplate | None = DEFAULT_TEMPLATE,
        handling: VideoHandling = AS_THEY_ARE,
    ) -> Prompt:
        """Apply the template, tokenise, run the vision tower (the costly part, skipped for videos in `encoded`).

        Raises ModelError if the tower shall choose and cannot, NotWanted between two parts of a long video, and
        ConversationRefused. Raises ContextOverflow; before the tower runs if the videos alone do not fit, or the words
        alone are far too many.
        """
        family = self.family
        self._require_room(videos, handling)
        if self._processor is not None:
            check_text_fits(self._processor, turns, self.context_length)
        known = encoded or EncoderCache(0)

        def make() -> Prompt:
            features, tower = list[EncodedVideo](), list[TowerRows]()
            for video in videos:
                with family.heard() if handling.hands_on_tower else nullcontext([]) as rows:
                    features.append(self._chosen(video, handling, known))
                if rows:
                    tower.append(TowerRows(words=features[-1].words, rows=torch.cat(rows).numpy()))
            prompt = family.prepare(self.decoder, turns, features, template)
            return replace(prompt, tower=tuple(tower)) if tower and len(tower) == len(videos) else prompt

        return make() if self._side is None else self._side.run(make)

    def has_room_for(self, videos: Sequence[Video], num_others: int = 0) -> bool:
        """Whether a prompt with all rows of these videos and `num_others` other rows fits the context."""
        return sum(map(self.family.num_video_tokens, videos)) + num_others < self.context_length

    def _require_room(self, videos: Sequence[Video], handling: VideoHandling) -> None:
        """Raise ContextOverflow, with remedies, if the videos alone fill the context."""
        choice, context = handling.choice, min(self.context_length, handling.context_length or self.context_length)
        num_tokens = self._num_rows_left(videos, 1.0)
        num_left = num_tokens if choice is None else self._num_rows_left(videos, choice.ratio)
        if num_left < context:
            return
        num_frames = sum(len(video.frames) for video in videos)
        most = (context - 1) * num_frames // num_left
        remedies = [f"fewer frames: about {most} fit" if most else "smaller pictures"]
        percent = bisect_left(range(1, 100), _FILLED * context, key=lambda r: self._num_rows_left(videos, r / 100))
        if percent:
            remedies.append(f"vidcom2 or v-cast with a compression_ratio of at most {percent / 100:g}")
        kept = f", of which {choice.method} keeps {num_left}" if choice is not None and num_left < num_tokens else ""
        raise ContextOverflow(
            f"{num_frames} frames take {num_tokens} tokens{kept}, but the context is {context}; "
            f"not counting text and answer, ask for {', or for '.join(remedies)}"
        )

    def _num_rows_left(self, videos: Sequence[Video], ratio: float) -> int:
        """Rows of the context that the videos take if a share `ratio` of their tokens is kept."""
        return sum(self.family.num_rows_left(video, ratio) for video in videos)

    def _chosen(self, video: Video, handling: VideoHandling, known: EncoderCache) -> EncodedVideo:
        """The chosen rows of a video. The cache keeps the whole video if it fits the context, since later questions may
        choose other rows; else it keeps the chosen rows.
        """
        choice, encode = handling.choice, partial(self.encode, is_wanted=handling.is_wanted)
        if choice is None or len(video.frames) < 2:
            return known.get(video, encode)
        if choice.choose is not None and self.has_room_for([video]):
            return choice.of(known.get(video, encode))
        key = None if video.key is None else f"{video.key} {choice.method} {choice.ratio!r}"
        return known.get(replace(video, key=key), partial(encode, choice=choice))

    @torch.inference_mode()
    def prefill(
        self, prompt: Prompt, cache: KVCache, num_rows: int, observer: QueryObserver | None = None
    ) -> Tensor | None:
        """Append the prompt's next `num_rows` rows; on the last chunk return the logits [V] after the prompt.

        V is the number of the tokenizer's tokens. Logits that only pad a checkpoint's matrix are cut off, since the
        other model of the pair may have fewer of them: each model must know every token that the other one chooses.
        """
        start = cache.length
        stop = min(start + num_rows, prompt.num_tokens)
        cos, sin = prompt.rotary
        additions = prompt.layer_additions
        with self.decoder.cores:
            hidden = self.decoder.prompts.prefill(
                prompt.embeddings[start:stop],
                (cos[start:stop], sin[start:stop]),
                Segment(cache, start, stop - start),
                () if additions is None else additions[:, start:stop].unbind(0),
                observer,
                int(stop == prompt.num_tokens),
            )
        cache.length = stop
        return self.decoder.prompts.logits(hidden)[0, : self._num_tokens] if len(hidden) else None

    @torch.inference_mode()
    def step(self, batch: Sequence[StepRows]) -> list[Tensor]:
        """Append every sequence's rows in one forward; returns logits [n_i, V] per sequence, V as in `prefill`."""
        for rows in batch:
            if rows.pruner is not None:
                rows.pruner.refresh(self.decoder, rows.cache, rows.ids[0], rows.position)
        counts = [len(rows.ids) for rows in batch]
        ids = [token for rows in batch for token in rows.ids]
        positions = [rows.position + i for rows, count in zip(batch, counts, strict=True) for i in range(count)]
        segments = [Segment(rows.cache, rows.cache.length, count) for rows, count in zip(batch, counts, strict=True)]
        with self.decoder.cores:
            logits = self._step(ids, positions, segments)[:, : self._num_tokens]
        for rows, count in zip(batch, counts, strict=True):
            rows.cache.length += count
        return list(logits.split(counts))

    @torch.inference_mode()
    def guess(self, batch: Sequence[tuple[StepRows, CoupledSampler, Sequence[int]]], most: int) -> list[list[Guess]]:
        """Draft tokens to propose after each sequence's rows, which are the last of the answer tokens given with them.

        One token per sequence; or up to `most` successive tokens if there is one sequence and the model can make
        several in one call. The cache then holds all rows except that of the last token.
        """
        rows, sampler, prefix = batch[0]
        if len(batch) == 1 and self._runner is not None and (sampler.is_plain or (sampler.is_free and most > 1)):
            before = rows.cache.length
            tokens, margins = self._ahead(rows, sampler, prefix, most)
            allowed = sampler.allowed(tokens, prefix)
            rows.cache.truncate(before + (len(rows.ids) - 1 + len(allowed) if allowed else 0))
            if allowed:
                return [[Guess.of(token, margin) for token, margin in zip(allowed, margins, strict=False)]]
        logits = self.step([rows for rows, _, _ in batch])
        last = [(sampler, scores[-1:], prefix) for (_, sampler, prefix), scores in zip(batch, logits, strict=True)]
        return [[each] for each in guess_all(last)]

    def use_when_alone(self, most_threads: int) -> None:
        """Let `decode` use up to `most_threads` threads; measurements decide how many pay off."""
        if self._runner is not None:
            self._runner.use_when_alone(most_threads)

    @torch.inference_mode()
    def decode(
        self, rows: StepRows, sampler: CoupledSampler, prefix: Sequence[int], most: int, longest_s: float = 60.0
    ) -> list[int]:
        """The next tokens of the only active sequence, made in one call; the same that `step` and `choose` would give.

        Returns up to `most` tokens; fewer if the sampler has to look at one of them itself, or if they take longer
        than `longest_s`. Returns an empty list and changes nothing if the model or the sampler cannot do this.
        Afterwards the cache holds all rows except that of the last token.
        """
        if self._runner is None or not sampler.is_free or rows.pruner is not None:
            return []
        before = rows.cache.length
        tokens, margins = self._ahead(rows, sampler, prefix, most, longest_s)
        confirmed = sampler.confirmed(tokens, margins, prefix)
        rows.cache.truncate(before + (len(rows.ids) - 1 + len(confirmed) if confirmed else 0))
        return confirmed

    def _ahead(
        self,
        rows: StepRows,
        sampler: CoupledSampler,
        prefix: Sequence[int],
        count: int,
        longest_s: float | None = None,
    ) -> tuple[list[int], list[float]]:
        """Up to `count` tokens, and each one's lead over its runner-up; only with a model that can run ahead."""
        assert self._runner is not None
        noise = self._noise(rows, sampler, prefix, count)
        segment = Segment(rows.cache, rows.cache.length, len(rows.ids))
        with self.decoder.cores:
            found = self._runner.run_ahead(
                rows.ids, rows.position, segment, noise, sampler.sharpness, longest_s=longest_s
            )
        rows.cache.length += len(rows.ids) + len(found[0]) - 1
        return found

    def _noise(self, rows: StepRows, sampler: CoupledSampler, prefix: Sequence[int], count: int) -> Tensor:
        """Noise for the scores of `count` tokens, the first one after `rows`: float32 [count, V]."""
        return sampler.noise(len(prefix), count, self.decoder.embedding[: self._num_tokens, 0])


def num_ids(tokenizer: Any) -> int:
    """How many ids a transformers tokenizer has: one more than its largest."""
    return int(max(tokenizer.get_vocab().values())) + 1
