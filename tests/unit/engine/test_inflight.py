"""What is kept of a request until its end: enough for the next worker to take it up, and nothing longer."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace

import pytest

from tests.unit.engine.counting_model import generate
from vidspec_service.engine.inflight import Inflight, Pending
from vidspec_service.engine.messages import Ended, Rejected, Tokens
from vidspec_service.engine.types import SpeculationMode
from vidspec_service.errors import EngineDead

pytestmark = pytest.mark.unit


def pending(name: str, mode: SpeculationMode = SpeculationMode.AUTO) -> Pending:
    return Pending(replace(generate(name), speculation=mode.value), os.memfd_create("payload"))


def due(inflight: Inflight) -> list[str]:
    """Everything that the target may have, which it then has."""
    found = []
    while (each := inflight.due()) is not None:
        inflight.gave(each)
        found.append(each.message.request_id)
    return found


def test_the_next_target_gets_what_has_not_ended_with_what_is_committed() -> None:
    inflight = Inflight(max_running=4)
    a, b = pending("a"), pending("b")
    with ExitStack() as stack:
        for each in (a, b):
            stack.enter_context(inflight.registered(each))
        assert due(inflight) == ["a", "b"]
        inflight.route(Tokens(request_id="b", ids=(5, 6)))
        inflight.route(Ended(request_id="a", finish_reason="stop", num_rollbacks=0, num_wasted=0))
        assert inflight.target_lost() is None
        assert due(inflight) == ["b"]
        assert b.resumed().committed == (5, 6)


def test_the_request_to_blame_can_be_refused_and_the_rest_is_due() -> None:
    inflight = Inflight(max_running=4)
    with ExitStack() as stack:
        for name in ("a", "b"):
            stack.enter_context(inflight.registered(pending(name)))
        due(inflight)
        inflight.target_lost()
        assert due(inflight) == ["a"]
        assert inflight.target_lost() == "a"
        assert inflight.route(Rejected(request_id="a", kind="failed", message=""))
        assert due(inflight) == ["b"]
        assert not inflight.forget("a")


def test_what_has_lost_two_drafts_goes_on_without_one() -> None:
    inflight = Inflight(max_running=4)
    followed, alone = pending("followed"), pending("alone", SpeculationMode.OFF)
    with inflight.registered(followed), inflight.registered(alone):
        assert followed.wants_draft
        assert not alone.wants_draft
        inflight.draft_lost()
        assert followed.wants_draft
        inflight.draft_lost()
        assert not followed.wants_draft


def test_where_nothing_can_go_on_nothing_is_due() -> None:
    inflight = Inflight(max_running=4)
    each = pending("a")
    with inflight.registered(each):
        inflight.fail_all(EngineDead("gone"))
        assert inflight.due() is None
        assert isinstance(each.events.get_nowait(), EngineDead)
        assert len(inflight) == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(each.payload)
