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
from vidspec_models.compression.dycoke import KVPruner
from vidspec_models.compression.token_selector import TokenSelector
from vidspec_models.decoder.decoder import Decoder, QueryObserver, Segment
from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.encoder_cache import EncodedVideo, EncoderCache, concatenated
from vidspec_models.errors import ContextOverflow
from vidspec_models.families.base import Family
from vidspec_models.families.conversation import check_text_fits, reasoning_of, tool_format
from vidspec_models.grammar import GrammarCompiler, GrammarError, GrammarMask, after_reasoning
from vidspec_models.prompt import Prompt
from vidspec_models.request import (
    DEFAULT_TEMPLATE,
    END_THINK,
    ChatTemplate,
    Reasoning,
    ToolFormat,
    TowerOutput,
    Turn,
    Video,
)
from vidspec_models.sampling import CoupledSampler, DraftToken, propose_all

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

    selector: TokenSelector | None = None  # which of the videos' rows the prompt keeps; None: all
    returns_tower_output: bool = False  # as `Prompt.tower`, unless a video's features were cached
    is_cancelled: Callable[[], bool] = lambda: False  # called between two parts of a long video
    context_length: int | None = None  # limit for prompt and answer in tokens; None: the model's context


DEFAULT_HANDLING = VideoHandling()


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
        self._grammar_compiler = self._num_tokens and GrammarCompiler(processor.tokenizer, stop_ids, self._num_tokens)
        device = decoder.embedding.device
        self._side = SideStream(device) if device.type == "cuda" else None

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, from 0 on, that can be tokens."""
        return len(self.decoder.embedding[: self._num_tokens])

    @property
    def context_length(self) -> int:
        return self.decoder.context_length

    @property
    def is_chunk_invariant(self) -> bool:
        """Whether a prompt's rows have the same bits however the prompt is cut into chunks."""
        return self.decoder.prompts.is_chunk_invariant

    @property
    def tool_format(self) -> ToolFormat:
        """How the checkpoint's chat template handles tools."""
        return tool_format(self._processor) if self._processor else ToolFormat.NONE

    def reasoning_after(self, prompt: Prompt, turns: Sequence[Turn], template: ChatTemplate | None) -> Reasoning:
        """How an answer to a prompt, made of these turns with this template, tells what the model thinks."""
        if not self._processor or template is None:
            return Reasoning.NONE
        return reasoning_of(self._processor, prompt.ids, turns[-1].text if template.continue_final_message else "")

    @torch.inference_mode()
    def encode(
        self, video: Video, selector: TokenSelector | None = None, is_cancelled: Callable[[], bool] = lambda: False
    ) -> EncodedVideo:
        """Run the vision tower, or continue from an equal tower's output in `video`; keep only the chosen rows.

        Raises ModelError if tokens are to be chosen in a tower that cannot do it, and Cancelled if `is_cancelled`
        returns True between two parts of the video.
        """
        with self.decoder.cores:
            if selector is not None and selector.select is None:
                return self.family.encode_merged(video, selector.ratio, is_cancelled)
            parts = self.family.encode_parts(video, is_cancelled)
            return selector.apply_in_parts(parts, self.context_length) if selector else concatenated(list(parts))

    def grammar_mask(self, grammar: str, reasoning: Reasoning = Reasoning.NONE) -> GrammarMask:
        """The mask that makes one answer follow a grammar; raises GrammarError. For one thread at a time.

        If the prompt has opened it, reasoning comes first, which is any text.
        """
        if not self._grammar_compiler:
            raise GrammarError("this model has no tokenizer to write a grammar's text with")
        if reasoning is Reasoning.OPEN:
            grammar = after_reasoning(grammar, self._processor.tokenizer.convert_tokens_to_ids(END_THINK))
        return self._grammar_compiler.mask(grammar)

    @torch.inference_mode()
    def prepare(
        self,
        turns: Sequence[Turn],
        videos: Sequence[Video],
        encoded: EncoderCache | None = None,
        template: ChatTemplate | None = DEFAULT_TEMPLATE,
        handling: VideoHandling = DEFAULT_HANDLING,
    ) -> Prompt:
        """Apply the template, tokenise, run the vision tower (the costly part, skipped for videos in `encoded`).

        Raises ConversationRefused, and ModelError and Cancelled as `encode` does. Raises ContextOverflow if the prompt
        does not fit; before the tower runs if the videos alone do not fit, or the text alone is far too long.
        """
        family = self.family
        self._require_room(videos, handling)
        if self._processor is not None:
            check_text_fits(self._processor, turns, self.context_length)
        known = encoded or EncoderCache(0)

        def make() -> Prompt:
            features, tower = list[EncodedVideo](), list[TowerOutput]()
            for video in videos:
                with family.record_tower() if handling.returns_tower_output else nullcontext([]) as rows:
                    features.append(self._chosen(video, handling, known))
                if rows:
                    text = features[-1].placeholder_text
                    tower.append(TowerOutput(placeholder_text=text, rows=torch.cat(rows).numpy()))
            prompt = family.prepare(self.decoder, turns, features, template)
            return replace(prompt, tower=tuple(tower)) if tower and len(tower) == len(videos) else prompt

        return make() if self._side is None else self._side.run(make)

    def has_room_for(self, videos: Sequence[Video], num_others: int = 0) -> bool:
        """Whether a prompt with all rows of these videos and `num_others` other rows fits the context."""
        return sum(map(self.family.num_video_tokens, videos)) + num_others < self.context_length

    def _require_room(self, videos: Sequence[Video], handling: VideoHandling) -> None:
        """Raise ContextOverflow, with remedies, if the videos alone fill the context."""
        selector, context = handling.selector, min(self.context_length, handling.context_length or self.context_length)
        num_tokens = self._num_kept_rows(videos, 1.0)
        num_left = num_tokens if selector is None else self._num_kept_rows(videos, selector.ratio)
        if num_left < context:
            return
        num_frames = sum(len(video.frames) for video in videos)
        most = (context - 1) * num_frames // num_left
        remedies = [f"fewer frames: about {most} fit" if most else "smaller pictures"]
        percent = bisect_left(range(1, 100), _FILLED * context, key=lambda r: self._num_kept_rows(videos, r / 100))
        if percent:
            remedies.append(f"vidcom2 or v-cast with a compression_ratio of at most {percent / 100:g}")
        kept = f", of which {selector.method} keeps {num_left}" if selector and num_left < num_tokens else ""
        raise ContextOverflow(
            f"{num_frames} frames take {num_tokens} tokens{kept}, but the context is {context}; "
            f"not counting text and answer, ask for {', or for '.join(remedies)}"
        )

    def _num_kept_rows(self, videos: Sequence[Video], ratio: float) -> int:
        """Rows of the context that the videos take if a share `ratio` of their tokens is kept."""
        return sum(self.family.num_kept_rows(video, ratio) for video in videos)

    def _chosen(self, video: Video, handling: VideoHandling, known: EncoderCache) -> EncodedVideo:
        """The chosen rows of a video. The cache keeps the whole video if it fits the context, since later questions may
        choose other rows; else it keeps the chosen rows.
        """
        selector, encode = handling.selector, partial(self.encode, is_cancelled=handling.is_cancelled)
        if selector is None or len(video.frames) < 2:
            return known.get(video, encode)
        if selector.select is not None and self.has_room_for([video]):
            return selector.apply(known.get(video, encode))
        key = None if video.key is None else f"{video.key} {selector.method} {selector.ratio!r}"
        return known.get(replace(video, key=key), partial(encode, selector=selector))

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
        deepstack = prompt.deepstack
        with self.decoder.cores:
            hidden = self.decoder.prompts.prefill(
                prompt.embeddings[start:stop],
                (cos[start:stop], sin[start:stop]),
                Segment(cache, start, stop - start),
                () if deepstack is None else deepstack[:, start:stop].unbind(0),
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
    def propose(
        self, batch: Sequence[tuple[StepRows, CoupledSampler, Sequence[int]]], most: int
    ) -> list[list[DraftToken]]:
        """Draft tokens to propose after each sequence's rows, which are the last of the answer tokens given with them.

        One token per sequence; or up to `most` successive tokens if there is one sequence and the model can make
        several in one call. The cache then holds all rows except that of the last token.
        """
        rows, sampler, prefix = batch[0]
        if (
            len(batch) == 1
            and self._runner is not None
            and sampler.can_run_ahead
            and (most > 1 or not sampler.is_constrained)
        ):
            before = rows.cache.length
            tokens, margins = self._ahead(rows, sampler, prefix, most)
            allowed = sampler.allowed(tokens, prefix)
            rows.cache.truncate(before + (len(rows.ids) - 1 + len(allowed) if allowed else 0))
            if allowed:
                return [[DraftToken.of(token, margin) for token, margin in zip(allowed, margins, strict=False)]]
        logits = self.step([rows for rows, _, _ in batch])
        last = [(sampler, scores[-1:], prefix) for (_, sampler, prefix), scores in zip(batch, logits, strict=True)]
        return [[each] for each in propose_all(last)]

    def use_when_alone(self, most_threads: int) -> None:
        """Let `decode` use up to `most_threads` threads; measurements decide how many pay off."""
        if self._runner is not None:
            self._runner.use_when_alone(most_threads)

    @torch.inference_mode()
    def decode(
        self, rows: StepRows, sampler: CoupledSampler, prefix: Sequence[int], most: int, longest_s: float = 60.0
    ) -> list[int]:
        """The next tokens of the only active sequence, made in one call; the same that `step` and `sample` would give.

        Returns up to `most` tokens; fewer if the sampler has to decide about one of them itself, or if they take longer
        than `longest_s`. Returns an empty list and changes nothing if the model or the sampler cannot do this.
        Afterwards the cache holds all rows except that of the last token.
        """
        if self._runner is None or not sampler.can_run_ahead or rows.pruner is not None:
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
                rows.ids, rows.position, segment, noise, sampler.inverse_temperature, longest_s=longest_s
            )
        rows.cache.length += len(rows.ids) + len(found[0]) - 1
        return found

    def _noise(self, rows: StepRows, sampler: CoupledSampler, prefix: Sequence[int], count: int) -> Tensor:
        """Noise for the scores of `count` tokens, the first one after `rows`: float32 [count, V]."""
        return sampler.noise(len(prefix), count, self.decoder.embedding[: self._num_tokens, 0])


def num_ids(tokenizer: Any) -> int:
    """How many ids a transformers tokenizer has: one more than its largest."""
    return int(max(tokenizer.get_vocab().values())) + 1
