"""The draft, for which a sleeping thread stands, is kept off the target's core as long as the two are connected."""

from __future__ import annotations

import os

import pytest

from tests.unit.engine.requests import target_request
from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import Follow, Peer, Verdict
from vidspec_service.engine.ipc.payload import read_ids
from vidspec_service.engine.target.draft_link import DraftLink

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
]


def num_cores_denied(thread: int) -> int:
    return len(os.sched_getaffinity(0) - os.sched_getaffinity(thread))


def test_every_message_keeps_a_connected_draft_off_the_core_of_its_sender(sleeper: int) -> None:
    link, (near, far) = DraftLink(), Channel.pair()
    link.connect_to(Peer(pid=sleeper), near)
    assert num_cores_denied(sleeper) == 0
    link.send(Follow(request_id="r"))
    assert num_cores_denied(sleeper) == 1
    assert far.receive() == (Follow(request_id="r"), [])
    link.disconnect()
    far.close()


def test_a_draft_that_is_gone_is_left_alone_since_its_id_may_be_another_process(sleeper: int) -> None:
    link, (near, far) = DraftLink(), Channel.pair()
    link.connect_to(Peer(pid=sleeper), near)
    link.disconnect()
    far.close()
    link.send(Follow(request_id="r"))
    assert num_cores_denied(sleeper) == 0


def test_a_draft_of_unknown_process_is_sent_its_messages_all_the_same() -> None:
    link, (near, far) = DraftLink(), Channel.pair()
    link.connect_to(Peer(), near)
    link.send(Follow(request_id="r"))
    assert far.receive() == (Follow(request_id="r"), [])
    link.disconnect()
    far.close()


@pytest.mark.parametrize("num_committed", [3, 60_000])
def test_a_verdict_of_any_length_arrives_whole_and_leaves_no_descriptor(num_committed: int) -> None:
    link, (near, far) = DraftLink(), Channel.pair()
    link.connect_to(Peer(), near)
    request = target_request(max_tokens=100_000, committed=range(num_committed))
    before = len(os.listdir("/proc/self/fd"))
    link.send_verdict(request)
    received = far.receive()
    assert received is not None
    verdict, fds = received
    assert isinstance(verdict, Verdict)
    assert (read_ids(*fds) if fds else verdict.ids) == tuple(range(num_committed))
    assert len(os.listdir("/proc/self/fd")) == before
    link.disconnect()
    far.close()
