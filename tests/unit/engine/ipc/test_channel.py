"""Channels carry every message with its file descriptors, and report a lost or silent peer."""

import itertools
import logging
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec import structs

from tests.fakes import MEMORY
from vidspec_models.compression import DyCoke
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.request import GenerationRequest, Preservation, SamplingParams
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.ipc.channel import Channel, ChannelClosed, ChannelFull, PeerLink, wait_readable
from vidspec_service.engine.ipc.messages import (
    Cancel,
    Configure,
    Ended,
    Generate,
    Heartbeat,
    LoadFailed,
    Loading,
    Message,
    Peer,
    Proposal,
    Ready,
    Rejected,
    Relevance,
    Tokens,
    Verdict,
)
from vidspec_service.engine.ipc.payload import read_request, write_request
from vidspec_service.engine.types import FinishReason, PromptReady, RejectReason

READY = Ready(
    context_length=10,
    kv_cache_tokens=10,
    memory=MEMORY,
    default_num_frames=8,
    device="cpu",
    dtype="float32",
    tokenizer_file="t",
    is_batch_invariant=True,
    versions={"torch": "2"},
)
MESSAGES: list[Message] = [
    Configure(
        role="target",
        spec=ModelSpec(path="bundled", role="target"),
        threads=1,
        prompt_threads=1,
        engine=EngineConfig(
            target=WorkerConfig(model="bundled"),
            draft=WorkerConfig(model="d", threads=1),
            dycoke=DyCoke(merge_ratio=0.3, hide_ratio=0.0),
            preservation=Preservation.TTM,
        ),
    ),
    Generate(request_id="r", has_committed=True),
    Cancel(request_id="r"),
    READY,
    Loading(what="loading weights", fraction=0.25),
    Loading(what="compiling", fraction=None),
    LoadFailed(message="no"),
    Heartbeat(cache_usage=0.25, busy_s=0.5, elapsed_s=1.0, until=2.5, forwards=((1.0, 1.5, 3), (2.0, 2.5, 1))),
    PromptReady(request_id="r", prompt_tokens=3, video_tokens=1, queue_s=0.0, prepare_s=0.1),
    Rejected(request_id="r", reason=RejectReason.TOO_LONG, message="why"),
    Tokens(request_id="r", ids=(1, 2), num_judged=3, num_accepted=1),
    Ended(request_id="r", finish_reason=FinishReason.STOP),
    Peer(),
    Proposal(request_id="r", epoch=1, start=2, ids=(3,), confidences=(0.5,), step_s=0.001, video_tokens=51),
    Verdict(request_id="r", start=0, ids=(1,), max_lead=4),
    Relevance(request_id="r", grid_checksum=2**32 - 1),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_arrives_as_it_was_sent(message: Message) -> None:
    left, right = Channel.pair()
    left.send(message)
    assert right.receive() == (message, [])
    left.close()
    right.close()


def test_a_checkpoints_top_k_is_a_whole_number_to_the_requests_that_take_it() -> None:
    left, right = Channel.pair()
    left.send(structs.replace(READY, default_sampling={"temperature": 0.7, "top_k": 20}))
    received = right.receive()
    assert received is not None
    assert isinstance(received[0], Ready)
    sampling = SamplingParams(**received[0].default_sampling)  # type: ignore[arg-type]  # top_k is an int there
    request = GenerationRequest(request_id="r", turns=(), sampling=sampling)
    assert read_request(write_request(request)) == request
    left.close()
    right.close()


def test_messages_keep_their_order_and_boundaries() -> None:
    left, right = Channel.pair()
    for message in MESSAGES:
        left.send(message)
    arrived = []
    while (received := right.receive()) is not None:
        arrived.append(received[0])
    assert arrived == MESSAGES
    left.close()
    right.close()


def test_a_file_descriptor_travels_and_outlives_the_senders() -> None:
    left, right = Channel.pair()
    fd = os.memfd_create("test")
    os.write(fd, b"frames")
    left.send(Peer(), (fd,))
    os.close(fd)
    received = right.receive()
    assert received is not None
    assert os.pread(received[1][0], 6, 0) == b"frames"
    os.close(received[1][0])
    left.close()
    right.close()


def test_a_closed_peer_is_an_error_on_both_directions() -> None:
    left, right = Channel.pair()
    left.close()
    with pytest.raises(ChannelClosed):
        right.receive()
    with pytest.raises(ChannelClosed):
        right.send(Peer())
    right.close()


@pytest.mark.parametrize("data", [b"\xff", b"\x00", b"\x00\x80", b"\x00\xc1garbage"])
def test_a_peer_that_sends_no_message_counts_as_gone_and_leaves_no_descriptor(data: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel, (end, other) = Channel(ours), os.pipe()
    socket.send_fds(theirs, [data], [other])
    os.close(other)
    with pytest.raises(ChannelClosed):
        channel.receive()
    assert os.read(end, 1) == b"", "nobody holds the other end"
    os.close(end)
    theirs.close()
    channel.close()


def test_a_peer_that_does_not_read_never_blocks_the_sender() -> None:
    left, right = Channel.pair()
    sent = iter(lambda: left.send(Cancel(request_id="r")), "never")
    with pytest.raises(ChannelFull):
        list(itertools.islice(sent, 100_000))
    left.close()
    right.close()


def test_a_patient_sender_waits_for_a_peer_that_pauses() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker, api = Channel(ours, send_timeout_s=10.0), Channel(theirs)

    def read_late() -> list[Message]:
        time.sleep(0.1)  # noqa: TID251  the sender fills the buffer within a few milliseconds
        found: list[Message] = []
        while not found or found[-1] != Cancel(request_id="last"):
            wait_readable([api], 10.0)
            while (received := api.receive()) is not None:
                found.append(received[0])
        return found

    sent = [*(Cancel(request_id=str(number)) for number in range(2000)), Cancel(request_id="last")]
    with ThreadPoolExecutor(1) as reader:
        arrived = reader.submit(read_late)
        for message in sent:
            worker.send(message)
        assert arrived.result(10) == sent
    worker.close()
    api.close()


def test_a_patient_sender_learns_that_its_peer_is_gone() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker = Channel(ours, send_timeout_s=10.0)
    closing = threading.Timer(0.1, theirs.close)
    closing.start()
    sent = iter(lambda: worker.send(Cancel(request_id="r")), "never")
    with pytest.raises(ChannelClosed):
        list(itertools.islice(sent, 100_000))
    closing.join()
    worker.close()


def test_a_message_that_belongs_into_shared_memory_is_refused() -> None:
    left, right = Channel.pair()
    with pytest.raises(ValueError, match="is too large for a channel"):
        left.send(LoadFailed(message="x" * 200_000))
    left.close()
    right.close()


def test_waiting_ends_with_the_first_message() -> None:
    left, right = Channel.pair()
    left.send(Peer())
    wait_readable([right], 10.0)
    assert right.receive() == (Peer(), [])
    left.close()
    right.close()


@pytest.mark.parametrize("says", [True, False])
def test_a_worker_whose_peer_ends_says_nothing_of_it(says: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The API logs the end of a worker that was not asked for; at a normal end the line would frighten for nothing."""
    caplog.set_level(logging.DEBUG)
    ours, theirs = Channel.pair()
    link = PeerLink("target")
    link.connect(ours)
    theirs.close()
    if says:
        link.send(Cancel(request_id="a"))
    else:
        assert link.receive() == []
    assert link.channel is None
    assert not caplog.records
