"""A client's own frames: JPEG images one after the other in a file, each decoded like any image, all of one size."""

from __future__ import annotations

from itertools import accumulate
from typing import BinaryIO

import av
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame

from vidspec_service.decoding.clip import Decoded, DecodingLimits, FrameRequest, FrameSequence
from vidspec_service.decoding.reader import check_file
from vidspec_service.decoding.reader.container import WHOLE_IMAGE, translate_errors
from vidspec_service.decoding.reader.frames import FrameConverter, Write
from vidspec_service.decoding.selection import select_sequence
from vidspec_service.errors import InvalidRequest, VideoUnreadable

_LONE_FRAME_S = 1.0


def read_sequence(file: BinaryIO, request: FrameRequest, limits: DecodingLimits, write: Write) -> Decoded:
    """Like `read_clip`, for the request's `sequence`; without `fps` and `num_frames` all its frames are kept.

    Raises what `read_clip` does; InvalidRequest if the images differ in size.
    """
    sequence = request.sequence
    assert sequence is not None
    check_file(file, limits, is_still=True)
    times_s, duration_s = sequence.timestamps_s, _duration_s(sequence)
    selection = select_sequence(times_s, duration_s, request, limits)
    starts = list(accumulate(sequence.num_bytes, initial=0))
    size: tuple[int, int] | None = None
    with translate_errors():
        converter = FrameConverter(len(selection.indices), limits, write, range(len(selection.indices)))
        for index in selection.indices:
            file.seek(starts[index])
            frame = _frame(file.read(sequence.num_bytes[index]), index, limits)
            converter.convert(index, frame, is_image=True)
            upright = converter.orientation.size(frame.width, frame.height)
            size = size or upright
            if size != upright:
                here, first = "{}x{}".format(*upright), "{}x{}".format(*size)
                raise InvalidRequest(
                    f"Frame {index} has {here} pixels, others {first}: all frames must have the same size.",
                    param="video",
                )
    width, height = converter.upright_size
    return Decoded(
        timestamps_s=tuple(times_s[i] for i in selection.indices),
        source_indices=selection.indices,
        source_fps=sequence.fps or len(times_s) / duration_s,
        source_num_frames=len(times_s),
        duration_s=duration_s,
        width=width,
        height=height,
        codec="mjpeg",
        warnings=(*selection.warnings, *converter.warnings),
    )


def _duration_s(sequence: FrameSequence) -> float:
    """To the end of the last frame's display, which lasts as long as the others on average."""
    times_s = sequence.timestamps_s
    if sequence.fps:
        return len(times_s) / sequence.fps
    mean_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else _LONE_FRAME_S
    return times_s[-1] + mean_s


def _frame(image: bytes, index: int, limits: DecodingLimits) -> VideoFrame:
    """Decoded without a container: no demuxer decides where an image begins."""
    codec = av.CodecContext.create("mjpeg", "r")
    assert isinstance(codec, VideoCodecContext)
    codec.options = {"max_pixels": limits.max_padded_pixels, **WHOLE_IMAGE}
    try:
        frames = codec.decode(Packet(image))
    except MemoryError:
        raise
    except av.FFmpegError:
        frames = []
    if not frames:
        why = f"it is damaged, is not a JPEG image, or has more than {limits.max_pixels:,} pixels (VIDSPEC_MAX_PIXELS)"
        raise VideoUnreadable(f"Frame {index} cannot be decoded: {why}.", param="video")
    return frames[0]
