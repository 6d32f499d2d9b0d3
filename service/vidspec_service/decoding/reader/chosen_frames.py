"""Decodes as little as the chosen frames need: from entry point to entry point, past unreferenced frames."""

from __future__ import annotations

from collections.abc import Iterator

import av
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from vidspec_service.decoding.frame_picker import FramePicker
from vidspec_service.decoding.reader.opening import packets_of
from vidspec_service.decoding.timeline import EntryPoint, Timeline

_CAN_SKIP = ("h264", "hevc")  # decoders that let skip_frame change from packet to packet


def chosen_frames(
    container: InputContainer, stream: VideoStream, timeline: Timeline, picker: FramePicker[VideoFrame]
) -> Iterator[tuple[int, VideoFrame]]:
    """Each of the picker's frames, or its stand-in, with its display index; two at most are alive."""
    decoder = _Decoder(stream, timeline, picker.wanted)
    upcoming = picker.next_wanted
    entry = timeline.entry_point(upcoming) if upcoming is not None else EntryPoint(0, 0)
    for number, packet in enumerate(packets_of(container, stream, [])):
        if number < entry.packet:
            continue
        for index, frame in decoder.decode(packet):
            if index >= entry.first_frame:
                yield from picker.offer(index, frame)
        if picker.next_wanted is None:
            return
        if picker.next_wanted != upcoming:
            upcoming = picker.next_wanted
            ahead = timeline.entry_point(upcoming)
            if ahead.packet > number + 1:
                entry = ahead
                decoder.restart()
                picker.forget_previous()
    for index, frame in decoder.decode(None):
        yield from picker.offer(index, frame)
    yield from picker.finish()


class _Decoder:
    """The codec, which gives frames in display order, and the display index of what came out last."""

    def __init__(self, stream: VideoStream, timeline: Timeline, wanted: tuple[int, ...]) -> None:
        self._codec = stream.codec_context
        self._timeline = timeline
        self._wanted_ticks = {timeline.ticks[index] for index in wanted}
        self._may_skip = self._codec.name in _CAN_SKIP and not timeline.is_counted
        self._is_progressive = False  # known from the first frame that comes out
        self._last_index = -1

    def restart(self) -> None:
        """The next packet does not follow the last one."""
        self._codec.flush_buffers()

    def decode(self, packet: Packet[VideoStream] | None) -> Iterator[tuple[int, VideoFrame]]:
        """What comes out for one packet, maybe nothing; None drains the codec."""
        if self._may_skip and packet is not None:
            # Frames that are neither wanted nor referred to: half the work of a usual H.264 file. Not in
            # interlaced video, where a wanted frame's second field may be a packet with a time of its own.
            is_needed = not self._is_progressive or packet.pts is None or packet.pts in self._wanted_ticks
            self._codec.skip_frame = "DEFAULT" if is_needed else "NONREF"
        try:
            frames = self._codec.decode(packet)
        except MemoryError:
            raise
        except av.FFmpegError:  # damaged: the picker finds a stand-in if the frame was wanted
            return
        for frame in frames:
            self._is_progressive = not frame.interlaced_frame
            if self._timeline.is_counted or frame.pts is None:
                self._last_index += 1
            else:
                self._last_index = self._timeline.index_at(frame.pts)
            yield self._last_index, frame
