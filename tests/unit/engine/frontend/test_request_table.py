"""What is kept of a request until its end: enough for a restarted worker to continue it; dropped at the end."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest

from tests.unit.engine.requests import request_of
from vidspec_models.request import Preservation, SpeculationMode
from vidspec_service.engine.frontend.request_table import RequestState, RequestTable
from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import Ended, Generate, Rejected, Tokens
from vidspec_service.engine.ipc.payload import Payload, close_fds, read_ids, write_request
from vidspec_service.engine.types import DraftView, FinishReason
from vidspec_service.engine.worker.input_processor import QueuedRequest
from vidspec_service.errors import EngineDead

pytestmark = pytest.mark.unit


def state(name: str, mode: SpeculationMode = SpeculationMode.AUTO) -> RequestState:
    return RequestState(request_of(name, mode), (os.memfd_create("payload"), os.memfd_create("frames")))


def due(table: RequestTable) -> list[str]:
    """Give the target all requests that are due; returns their ids."""
    found = []
    while (each := table.next_due()) is not None:
        table.mark_sent(each)
        found.append(each.request_id)
    return found


def test_the_next_target_gets_what_has_not_ended_with_what_is_committed() -> None:
    table = RequestTable(max_running_requests=4)
    a, b = state("a"), state("b")
    with ExitStack() as stack:
        for each in (a, b):
            stack.enter_context(table.registered(each))
        assert due(table) == ["a", "b"]
        table.route(Tokens(request_id="b", ids=(5, 6)))
        table.route(DraftView(request_id="b", preservation=Preservation.HIPPO, prune_ratio=0.9, videos=()))
        table.route(Ended(request_id="a", finish_reason=FinishReason.STOP))
        assert table.target_lost() is None
        assert due(table) == ["b"]
        sent: list[tuple[Generate, tuple[int, ...]]] = []

        def send(message: Generate, fds: Payload) -> bool:
            sent.append((message, read_ids(os.dup(fds[-1]))))
            return True

        assert b.send_via(send)
        assert sent == [(Generate(request_id="b", has_committed=True), (5, 6))]


def test_a_long_answer_is_given_to_the_next_worker_whole() -> None:
    near, far = Channel.pair()
    asked = request_of("a", committed=(1, 2))
    taken_up = RequestState(asked, write_request(asked), committed=[70_000 + number for number in range(60_000)])

    def send(message: Generate, fds: Payload) -> bool:
        near.send(message, fds)
        return True

    assert taken_up.send_via(send)
    received = far.receive()
    assert received is not None
    message, fds = received
    assert isinstance(message, Generate)
    assert QueuedRequest.of(message, fds).request.committed == (1, 2, *taken_up.committed)
    close_fds(taken_up.payload)
    near.close()
    far.close()


def test_the_request_to_blame_can_be_refused_and_the_rest_is_due() -> None:
    table = RequestTable(max_running_requests=4)
    with ExitStack() as stack:
        for name in ("a", "b"):
            stack.enter_context(table.registered(state(name)))
        due(table)
        table.target_lost()
        assert due(table) == ["a"]
        assert table.target_lost() == "a"
        assert table.route(Rejected(request_id="a", message=""))
        assert due(table) == ["b"]
        assert not table.remove("a")


def test_what_has_lost_two_drafts_goes_on_without_one() -> None:
    table = RequestTable(max_running_requests=4)
    followed, alone = state("followed"), state("alone", SpeculationMode.OFF)
    with table.registered(followed), table.registered(alone):
        assert followed.wants_draft
        assert not alone.wants_draft
        for _ in range(2):
            table.draft_lost()  # while it loaded, it had no requests
            assert followed.wants_draft
            followed.has_draft = True  # it is given them when it is ready
            table.draft_lost()
        assert not followed.wants_draft


def test_where_nothing_can_go_on_nothing_is_due() -> None:
    table = RequestTable(max_running_requests=4)
    each = state("a")
    with table.registered(each):
        table.fail_all(EngineDead("gone"))
        assert table.next_due() is None
        assert isinstance(each.messages.get_nowait(), EngineDead)
        assert len(table) == 0
    for fd in each.payload:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_what_is_sent_again_with_its_tokens_leaves_no_descriptor() -> None:
    again = state("a")
    again.committed += [5, 6]
    num_before = len(os.listdir("/proc/self/fd"))
    assert again.send_via(lambda *_: True)
    assert len(os.listdir("/proc/self/fd")) == num_before
    close_fds(again.payload)
