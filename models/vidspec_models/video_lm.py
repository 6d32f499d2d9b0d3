"""VideoLM: a loaded model as the engine drives it: prepare a prompt, prefill it in chunks, step many requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

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

_FILLED = 0.9  # of the context, what an advised ratio may: words and an answer need room, too


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """New rows of one sequence: `ids` go after the cache's rows; the first has rotary position `position`."""

    cache: KVCache
    ids: Sequence[int]
    position: int
    pruner: KVPruner | None = None  # DyCoke on the target; `ids` then stay within what its `num_rows_left` says


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoHandling:
    """What is done with a prompt's videos, besides encoding them."""

    choice: TokenChoice | None = None  # the prompt has only these rows of them
    hands_on_tower: bool = False  # the prompt says what the tower has made of them, unless one was known
    is_wanted: Callable[[], bool] = lambda: True  # asked between two parts of a long one
    context_length: int | None = None  # tokens that prompt and answer may have; None: as many as the model's


AS_THEY_ARE = VideoHandling()


class VideoLM:
    """One model, on one device or on several. Not thread-safe; keeps no state between calls but its weights."""

    def __init__(
        self, family: Family, decoder: Decoder, stop_ids: frozenset[int], step: CpuStep | CudaStep | None = None
    ) -> None:
        """`step` computes decoding steps in the decoder's place, and can make several in one go."""
        self._family = family
        processor = self._processor = family.processor
        self.decoder = decoder
        self._step = step or decoder.step
        self._runner = step
        self.has_kernels = step is not None  # of its own for decoding steps; torch computes the rest
        self.stop_ids = stop_ids
        # Ids that the tokenizer has; None, for all, where there is no tokenizer.
        self._num_tokens = None if processor is None else max(processor.tokenizer.get_vocab().values()) + 1
        self._grammars = self._num_tokens and Grammars(processor.tokenizer, stop_ids, self._num_tokens)
        device = decoder.embedding.device
        self._side = SideStream(device) if device.type == "cuda" else None

    @property
    def context_length(self) -> int:
        return self.decoder.context_length

    @property
    def is_chunk_invariant(self) -> bool:
        """Whether a prompt's rows have the same bits however it is cut into chunks."""
        return getattr(self.decoder.prefill, "is_chunk_invariant", False)

    @property
    def default_sampling(self) -> dict[str, float]:
        """Fields of SamplingParams that the checkpoint wants where a request does not say."""
        return sampling_defaults(getattr(self._family.model, "generation_config", None))

    @property
    def tool_format(self) -> ToolFormat:
        """What the checkpoint's chat template makes of tools."""
        processor = self._processor
        return tool_format(processor.chat_template, processor.tokenizer.get_vocab()) if processor else ToolFormat.NONE

    @property
    def default_num_frames(self) -> int:
        return self._family.default_num_frames

    @property
    def max_frames(self) -> int | None:
        return self._family.max_frames

    def tower_digest(self) -> str | None:
        """Equal for two models one of whose towers can stand for the other's; None where none can."""
        return self._family.tower_digest()

    def num_video_tokens(self, video: Video) -> int:
        """Prompt rows that it takes at least."""
        return self._family.num_video_tokens(video)

    @property
    def can_merge_frames(self) -> bool:
        """Whether the tower can choose, which merges frames before it does."""
        return self._family.can_merge_frames

    @torch.inference_mode()
    def encode(
        self, video: Video, choice: TokenChoice | None = None, is_wanted: Callable[[], bool] = lambda: True
    ) -> EncodedVideo:
        """Run the vision tower, or go on from what an equal one has made of the video; keep what is chosen.

        Raises ModelError where the tower is to choose and cannot, NotWanted between two parts of a video if it is not.
        """
        with self.decoder.cores:
            if choice is not None and choice.choose is None and len(video.frames) > 1:
                return self._family.encode_merged(video, choice.ratio)
            parts = self._family.encode_parts(video, is_wanted)
            return joined(list(parts)) if choice is None else choice.in_stretches(parts, self.context_length)

    def grammar_mask(self, grammar: str) -> GrammarMask:
        """What holds one answer to a grammar; raises GrammarError. For one thread at a time."""
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
        """Template, tokenise, run the vision tower: the costly part, which `encoded` spares a video it knows.

        Raises ModelError where the tower is to choose and cannot, NotWanted while it works on a long video, and
        ContextOverflow, before the cost where the videos alone, or the words alone, are far too much.
        """
        family = self._family
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
        """Whether a prompt may have all rows of them, and so many others."""
        return sum(map(self.num_video_tokens, videos)) + num_others < self.context_length

    def _require_room(self, videos: Sequence[Video], handling: VideoHandling) -> None:
        """Raises ContextOverflow."""
        choice, context = handling.choice, min(self.context_length, handling.context_length or self.context_length)
        num_tokens = self._num_rows_left(videos, 1.0)
        num_left = num_tokens if choice is None else self._num_rows_left(videos, choice.ratio)
        if num_left < context:
            return
        num_frames = sum(len(video.frames) for video in videos)
        most = (context - 1) * num_frames // num_left
        remedies = [f"fewer frames: about {most} fit" if most else "smaller pictures"]
        ratio = next((r / 100 for r in range(99, 0, -1) if self._num_rows_left(videos, r / 100) < _FILLED * context), 0)
        if ratio:
            remedies.append(f"vidcom2 or v-cast with a compression_ratio of at most {ratio:g}")
        kept = f", of which {choice.method} leaves {num_left}" if choice is not None and num_left < num_tokens else ""
        raise ContextOverflow(
            f"{num_frames} frames take {num_tokens} tokens{kept}, the context is {context}; "
            f"without words and answer, ask for {', or for '.join(remedies)}"
        )

    def _num_rows_left(self, videos: Sequence[Video], ratio: float) -> int:
        """That take of the context where a share of `ratio` is chosen."""
        return sum(self._family.num_rows_left(video, ratio) for video in videos)

    def _chosen(self, video: Video, handling: VideoHandling, known: EncoderCache) -> EncodedVideo:
        """Of a video that fits the whole is kept for further questions, whatever these choose; else what was chosen."""
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

        V are the tokenizer's tokens. Rows that only pad a checkpoint's matrix are cut off, since another model of the
        pair may have fewer: what one side chooses, the other can read.
        """
        start = cache.length
        stop = min(start + num_rows, prompt.num_tokens)
        cos, sin = prompt.rotary
        additions = prompt.layer_additions
        with self.decoder.cores:
            hidden = self.decoder.prefill(
                prompt.embeddings[start:stop],
                (cos[start:stop], sin[start:stop]),
                Segment(cache, start, stop - start),
                () if additions is None else additions[:, start:stop].unbind(0),
                observer,
                int(stop == prompt.num_tokens),
            )
        cache.length = stop
        return self.decoder.logits(hidden)[0, : self._num_tokens] if len(hidden) else None

    @torch.inference_mode()
    def step(self, batch: Sequence[StepRows]) -> list[Tensor]:
        """Append every sequence's rows in one forward; returns logits [n_i, V] per sequence, V as `prefill`'s."""
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
        """What a draft proposes after every sequence's rows, which end the answer's tokens given with them.

        One token each; up to `most`, each after the one before, of a single sequence where the model can do that in
        one go. The cache then holds all rows but that of the last token.
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
        """`decode` may have up to so many threads: as many as pay, which is measured."""
        if self._runner is not None:
            self._runner.use_when_alone(most_threads)

    @torch.inference_mode()
    def decode(
        self, rows: StepRows, sampler: CoupledSampler, prefix: Sequence[int], most: int, longest_s: float = 60.0
    ) -> list[int]:
        """The next tokens of the only sequence there is, each after the one before: those of `step` and `choose`.

        Up to `most`, in one go; fewer where the sampler would have to be asked again after one of them, or where they
        take longer than `longest_s`. None, and nothing is changed, where a model or a sampler cannot do that. The
        cache then holds all rows but the last token's.
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
        """So many tokens or fewer, and how far each one's runner-up is behind; only where the model can."""
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
        """What is added to the scores of so many tokens, the first after `rows`: float32 [count, V]."""
        return sampler.noise(len(prefix), count, self.decoder.embedding[: self._num_tokens, 0])
