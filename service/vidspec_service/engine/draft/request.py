"""DraftRequest: everything the draft holds for one request: what it sees of the video, its cache, its chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch
from torch import Tensor

from vidspec_models.decoder.kv_cache import KVCache
from vidspec_models.grammar import GrammarMask
from vidspec_models.preservation.selection import CellSelector, Strategy
from vidspec_models.prompt import CLIP_GAP, Prompt, cell_rows, grid_checksum, pruned
from vidspec_models.request import GenerationRequest, Preservation
from vidspec_models.sampling import CoupledSampler, DraftToken
from vidspec_models.video_lm import StepRows
from vidspec_service.engine.ipc.messages import Follow, Verdict
from vidspec_service.engine.ipc.payload import CellScores
from vidspec_service.engine.speculation.plan import MAX_AHEAD
from vidspec_service.engine.speculation.proposals import DraftSequence, num_before_end
from vidspec_service.engine.types import DraftView, SeenCells

MIN_CALL_TOKENS = 8  # least tokens of one call, between two looks for the target's messages; 5 were 4 % slower
MAX_VIEW_CELLS = 512 * 1024  # cells, one bit each: 64 KB, half of a message; prompts with more cells get no view


class PrunedView:
    """The part of a prompt that the draft sees.

    Chosen at once, from the draft's own features and the target's attention if that is known; if it is known later, and
    there is time, chosen again.
    """

    def __init__(
        self, prompt: Prompt, strategy: Strategy, ratio: float, seed: int, scores: CellScores | None = None
    ) -> None:
        self._whole = prompt
        self._strategy = strategy
        self._ratio = ratio
        self._seed = seed
        selection, relevance = CellSelector(strategy, ratio, prompt, seed), self._relevance(scores)
        self._kept = selection.kept(relevance)
        # Large; not kept for longer than it is needed.
        self._selection = selection if strategy.relevance and relevance is None else None
        self.prompt = pruned(prompt, self._kept)

    @property
    def num_video_tokens(self) -> int:
        return len(self._kept)

    def event(self, request_id: str) -> DraftView:
        """The view as an event for requests that ask for it."""
        return DraftView(
            request_id=request_id,
            preservation=Preservation(self._strategy.name),
            prune_ratio=self._ratio,
            videos=seen_cells(self._whole.grid[self._kept], self._whole.video_shapes),
        )

    def is_same_as(self, other: PrunedView) -> bool:
        """Whether it shows the same rows of the very same prompt."""
        return self._whole is other._whole and torch.equal(self._kept, other._kept)

    def refine(self, scores: CellScores) -> bool:
        """Choose again by the target's attention; True if the choice has changed."""
        relevance = self._relevance(scores)
        if relevance is None:
            return False
        selection = self._selection or CellSelector(self._strategy, self._ratio, self._whole, self._seed)
        kept, self._selection = selection.kept(relevance), None
        if torch.equal(kept, self._kept):
            return False
        self._kept, self.prompt = kept, pruned(self._whole, kept)
        return True

    def _relevance(self, scores: CellScores | None) -> Tensor | None:
        """float32 [V]; None without scores, or if they are for other cells (from a model with another grid)."""
        if scores is None or scores.grid_checksum != grid_checksum(self._whole):
            return None
        cells = cell_rows(self._whole)
        if len(scores.values) != len(cells):
            return None
        relevance = self._whole.embeddings.new_zeros(self._whole.num_video_tokens, dtype=torch.float32)
        relevance[cells] = torch.from_numpy(scores.values.astype("float32")).to(relevance.device)
        return relevance


def seen_cells(kept: Tensor, shapes: Sequence[tuple[int, int, int]]) -> tuple[SeenCells, ...]:
    """One for each video of a prompt, in order; none if they have more than MAX_VIEW_CELLS places.

    `kept`, int64 [K, 3], are rows of a prompt's `grid`, `shapes` its `video_shapes`. Rows of no cell are left out.
    """
    if sum(map(prod, shapes)) > MAX_VIEW_CELLS:
        return ()
    places, first, found = kept.cpu().numpy(), 0, list[SeenCells]()
    for shape in shapes:
        mine = places[(places[:, 0] >= first) & (places[:, 0] < first + shape[0])] - (first, 0, 0)
        dense = np.zeros(shape, np.bool_)
        dense[tuple(mine.T)] = True
        found.append(SeenCells(shape=shape, bits=np.packbits(dense, bitorder="little").tobytes()))
        first += shape[0] + CLIP_GAP
    return tuple(found)


@dataclass(slots=True)
class DraftRequest:
    """The cache holds the part of the prompt that the draft sees (less during prefill), then tokens of the sequence."""

    asked: GenerationRequest  # without its frames, which have been read
    view: PrunedView
    cache: KVCache
    sampler: CoupledSampler
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    grammar: GrammarMask | None = None  # the sampler has it, too
    sequence: DraftSequence = field(default_factory=DraftSequence)
    scores: CellScores | None = None  # the target's attention, not used yet
    prepare_s: float | None = 0.0  # seconds of work before the first proposal, which reports them; None from then on
    max_lead: int = 0  # tokens ahead of what is committed, as the target allows
    min_draft_tokens: int = 0  # of these, the tokens that the target waits for
    is_steered: bool = False  # a grammar has just forced or excluded tokens

    @property
    def request_id(self) -> str:
        return self.asked.request_id

    @property
    def prompt(self) -> Prompt:
        return self.view.prompt

    @property
    def is_prefilled(self) -> bool:
        return self.cache.length >= self.prompt.num_tokens

    @property
    def missing(self) -> list[int]:
        """Tokens that are not in the cache yet."""
        return self.sequence.tokens[self.cache.length - self.prompt.num_tokens :]

    @property
    def has_ended(self) -> bool:
        """The draft's answer is complete: nothing to do unless the target goes on."""
        return bool(self.sequence.tokens) and self.sequence.tokens[-1] in self.stop_ids

    @property
    def can_run(self) -> bool:
        """Something is committed to build on, and more may be proposed."""
        return bool(self.sequence.tokens) and self.num_left > 0

    @property
    def may_begin(self) -> bool:
        """Whether to propose the first token, which the target has not chosen yet."""
        return not self.sequence.tokens and self.num_left > 0

    @property
    def num_left(self) -> int:
        """Tokens that may be proposed now."""
        return min(self.max_lead - self.sequence.num_uncertain, self._num_places)

    @property
    def num_at_once(self) -> int:
        """Tokens to guess in one call if alone.

        The target verifies what it has meanwhile: the more that is, the later it misses the next ones. After a grammar
        has decided about some, it may decide about the next one, too.
        """
        return min(1 if self.is_steered else max(MIN_CALL_TOKENS, self.sequence.num_ahead), self.num_left)

    @property
    def _num_places(self) -> int:
        sequence = self.sequence
        return 0 if self.has_ended else min(MAX_AHEAD - sequence.num_ahead, self.max_tokens - len(sequence.tokens))

    def forced(self) -> list[int]:
        """Tokens that the grammar forces: they need no forward of their own and go into the cache with the next one."""
        return [] if self.grammar is None else self.grammar.forced(self.sequence.tokens)[: self._num_places]

    def rows(self) -> StepRows:
        """The tokens that are not in the cache yet."""
        return StepRows(
            cache=self.cache,
            ids=self.missing,
            position=self.prompt.next_position + self.cache.length - self.prompt.num_tokens,
        )

    def propose(self, guesses: Sequence[DraftToken]) -> Sequence[DraftToken]:
        """Append guessed tokens to the sequence, up to one that ends the answer; returns those appended."""
        kept = guesses[: num_before_end([each.token for each in guesses], self.stop_ids) + 1]
        self.sequence.propose([each.token for each in kept])
        self._cut(self.prompt.num_tokens + len(self.sequence.tokens))
        return kept

    def handle(self, message: Follow | Verdict | CellScores) -> None:
        """Take committed tokens, or the target's attention, which a prefilled request uses once it has time."""
        if isinstance(message, Follow):
            self.max_lead = message.max_lead
        elif isinstance(message, Verdict):
            standing = self.sequence.learn(message.start, message.ids)
            self.max_lead, self.min_draft_tokens = message.max_lead, message.min_draft_tokens
            self._cut(self.prompt.num_tokens + standing)
        else:
            self.scores = message
            if not self.is_prefilled:
                self.refresh_view()

    def refresh_view(self) -> bool:
        """Choose the view again by the target's attention, if it has come; False if the view stays the same.

        A new view needs a new prefill, since the cached rows have attended to the old one. The prefill of a pruned
        prompt is short, and earlier proposals stay valid.
        """
        scores, self.scores = self.scores, None
        if scores is None or not self.view.refine(scores):
            return False
        self.cache.truncate(0)
        return True

    def restart(self) -> None:
        """Start again for a new target, which sends all committed tokens again."""
        self.sequence, self.max_lead = DraftSequence(), 0
        self._cut(self.prompt.num_tokens)

    def _cut(self, length: int) -> None:
        self.cache.truncate(min(self.cache.length, length))
