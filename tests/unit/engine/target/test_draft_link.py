"""The draft is kept off the target's core as long as the two are connected."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from vidspec_service.engine.ipc.channel import Channel
from vidspec_service.engine.ipc.messages import Follow, Peer
from vidspec_service.engine.target.draft_link import DraftLink

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
]


@pytest.fixture
def draft() -> Iterator[int]:
    """The native id of another thread, which stands for the draft's main thread."""
    end = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        thread = threads.submit(threading.get_native_id).result(10)
        threads.submit(end.wait, 20)
        yield thread
        end.set()


def num_cores_denied(thread: int) -> int:
    return len(os.sched_getaffinity(0) - os.sched_getaffinity(thread))


def test_every_message_keeps_a_connected_draft_off_the_core_of_its_sender(draft: int) -> None:
    link, (near, far) = DraftLink(), Channel.pair()
    link.meet(Peer(pid=draft), near)
    assert num_cores_denied(draft) == 0
    link.send(Follow(request_id="r"))
    assert num_cores_denied(draft) == 1
    assert far.receive() == (Follow(request_id="r"), [])
    link.disconnect()
    far.close()


def test_a_draft_that_is_gone_is_left_alone_since_its_id_may_be_another_process(draft: int) -> None:
    link, (near, far) = DraftLink(), Channel.pair()
    link.meet(Peer(pid=draft), near)
    link.disconnect()
    far.close()
    link.send(Follow(request_id="r"))
    assert num_cores_denied(draft) == 0


def test_a_draft_of_unknown_process_is_sent_its_messages_all_the_same() -> None:
    link, (near, far) = DraftLink(), Channel.pair()
    link.meet(Peer(), near)
    link.send(Follow(request_id="r"))
    assert far.receive() == (Follow(request_id="r"), [])
    link.disconnect()
    far.close()
