"""What the draft says next: its chain, or how it would go on from a second choice."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from tests.unit.engine.counting_model import CELLS, CountingModel, configure
from vidspec_models.encoded_videos import EncodedVideos
from vidspec_models.inputs import Turn
from vidspec_models.kv_cache import KVCache, KVPool
from vidspec_models.preservation import find_strategy
from vidspec_models.token_sampling import CoupledSampler, Guess, SamplingLaw
from vidspec_models.video_lm import VideoLM
from vidspec_service.engine.channels import Channel
from vidspec_service.engine.draft_loop import DraftLoop
from vidspec_service.engine.drafting import Drafting, View
from vidspec_service.engine.messages import Proposal, Verdict
from vidspec_service.engine.proposing import Proposer

pytestmark = pytest.mark.unit

SURE, UNSURE = 0.999, 0.6


def drafting(*chain: Guess, may_wander: bool = True, max_tokens: int = 50) -> Drafting:
    """One token, 7, is committed; all but the chain's last token are in the cache."""
    prompt = CountingModel().prepare([Turn(role="user", text="ab")], [], EncodedVideos(0))
    cache = KVCache(CountingModel.decoder.geometry, CELLS + 64)
    found = Drafting(
        request_id="r",
        view=View(prompt, find_strategy("none"), 0.0, seed=0),
        cache=cache,
        sampler=CoupledSampler(SamplingLaw()),
        max_tokens=max_tokens,
    )
    found.hear(Verdict(request_id="r", start=0, ids=(7,), room=8, alternatives=may_wander))
    found.sequence.propose(chain)
    cache.length = prompt.num_tokens + len(chain)
    cache.keys[...] = torch.arange(cache.capacity).view(-1, 1)
    return found


def alternative(found: Drafting) -> Proposal | None:
    """As the loop asks for one."""
    doubt = found.doubt()
    return None if doubt is None else Proposer(cast("VideoLM", CountingModel())).alternative(found, doubt)


def test_an_alternative_goes_on_from_the_runner_up_where_the_chain_is_likeliest_to_break() -> None:
    found = drafting(Guess(8, 1, SURE), Guess(9, 40, UNSURE), Guess(10, 2, SURE))
    keys = found.cache.keys.clone()
    proposal = alternative(found)
    assert proposal is not None
    assert (proposal.epoch, proposal.start) == (found.sequence.epoch, 2)
    assert proposal.ids == (40, 41)
    assert proposal.confidences[0] == 1.0
    assert found.sequence.tokens == [7, 8, 9, 10]
    assert found.cache.length == found.prompt.num_tokens + 3
    assert torch.equal(found.cache.keys, keys)
    found.hear(Verdict(request_id="r", start=1, ids=(8, 40), room=8, alternatives=True))
    assert found.sequence.tokens == [7, 8, 40, 41]
    assert found.missing == [40, 41]


def test_the_next_proposal_says_what_was_adopted() -> None:
    found = drafting(Guess(8, 40, UNSURE))
    assert alternative(found) is not None
    found.hear(Verdict(request_id="r", start=1, ids=(40,), room=8, alternatives=True))
    (proposal,) = Proposer(cast("VideoLM", CountingModel())).propose([found])
    assert (proposal.start, proposal.ids) == (2, (41, 42))


def test_there_is_none_where_the_chain_is_sure_or_the_answer_ends_or_the_mode_has_none() -> None:
    assert alternative(drafting(Guess(8, 1, SURE), Guess(9, 1, SURE))) is None
    assert alternative(drafting(Guess(8, 1, UNSURE), max_tokens=4)) is None
    assert alternative(drafting(Guess(8, 1, UNSURE), may_wander=False)) is None
    known = drafting(Guess(8, 1, UNSURE))
    assert alternative(known) is not None
    assert alternative(known) is None


def test_alternatives_come_before_a_chain_that_would_hardly_hold_and_cost_nobody_its_rows() -> None:
    ours, theirs = Channel.pair()
    loop = DraftLoop(cast("VideoLM", CountingModel()), theirs, configure("draft"))
    target, loop._target = Channel.pair()

    def said(*chain: Guess, num_tokens: int = 1000) -> Proposal | None:
        found = drafting(*chain)
        loop._pool = KVPool(CountingModel.decoder.geometry, num_tokens)
        loop._pool.num_used = found.cache.capacity
        loop._active = {"r": found}
        loop._propose()
        received = target.receive()
        return received[0] if received is not None and isinstance(received[0], Proposal) else None

    sure, torn = said(Guess(8, 1, SURE), Guess(9, 1, 0.7)), said(Guess(8, 1, 0.7), Guess(9, 1, 0.4))
    assert sure is not None
    assert not sure.is_alternative
    assert torn is not None
    assert torn.is_alternative
    full = [Guess(8, 1, UNSURE)] * 62  # no room for more, and no more rows to be had
    assert said(*full, num_tokens=CELLS + 64) is None
    assert list(loop._active) == ["r"]
    for channel in (ours, theirs, target, loop._target):
        channel.close()
