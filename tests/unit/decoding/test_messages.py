"""What a child says: errors come back as they were, and nothing outside the table comes back at all."""

from __future__ import annotations

import pytest

from vidspec_service.decoding.frame_request import FrameRequest
from vidspec_service.decoding.limits import DecodingLimits
from vidspec_service.decoding.messages import Broken, Job, Refused, decode_answer, decode_job, encode
from vidspec_service.errors import (
    InvalidRequest,
    NotFound,
    RequestError,
    VideoTooLarge,
    VideoUnreadable,
    VideoUnsupported,
)

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("kind", [InvalidRequest, VideoTooLarge, VideoUnreadable, VideoUnsupported])
def test_a_refusal_comes_back_as_the_same_error(kind: type[RequestError]) -> None:
    answer = decode_answer(encode(Refused.of(kind("Too läng.", param="video"))))
    assert isinstance(answer, Refused)
    error = answer.error()
    assert (type(error), error.message, error.param) == (kind, "Too läng.", "video")


def test_an_error_outside_the_table_cannot_be_had() -> None:
    answer = decode_answer(encode(Refused.of(NotFound("no"))))
    assert isinstance(answer, Refused)
    with pytest.raises(KeyError):
        answer.error()


def test_a_job_arrives_whole() -> None:
    job = Job(path="/tmp/ä", request=FrameRequest(fps=0.1), default_num_frames=8, limits=DecodingLimits(timeout_s=1.5))
    assert decode_job(encode(job)) == job


def test_broken_carries_its_detail() -> None:
    assert decode_answer(encode(Broken(detail="Traceback"))) == Broken(detail="Traceback")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b'{"type":"other"}', b'{"type":"decoded"}', b"\x80\x04\x95", b"\xff"]
)
def test_anything_but_an_answer_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        decode_answer(data)
