"""The chosen frames: decoded from keyframe to keyframe, turned upright, written as RGB into one memory."""

from __future__ import annotations

import errno
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain
from typing import NamedTuple, cast

import av
from av.filter import Graph
from av.packet import Packet, PacketSideData, PktSideDataT
from av.sidedata.sidedata import SideDataContainer
from av.sidedata.sidedata import Type as SideDataType
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter
from av.video.stream import VideoStream

from vidspec_service.decoding.clip import DecodingLimits
from vidspec_service.decoding.reader.timeline import EntryPoint, Timeline
from vidspec_service.decoding.selection import FramePicker
from vidspec_service.errors import VideoTooLarge, VideoUnreadable, VideoUnsupported

# To return any side data of a frame, PyAV reads all of it, and it knows fewer kinds than its FFmpeg: the EXIF data that
# cameras write into JPEG made every such frame unreadable. An unknown kind is read as one that nobody asks for.
SideDataType._missing_ = classmethod(lambda kinds, _: kinds.SEI_UNREGISTERED)  # type: ignore[assignment]

_CAN_SKIP = ("h264", "hevc")  # decoders that let skip_frame change from packet to packet
_LASTING: tuple[PktSideDataT, ...] = ("palette", "new_extradata")  # in one packet, holds for all packets after it
_MAX_OBLONG = 200  # long side over short side: Qwen's processors refuse more, and others enlarge the short side
_MAX_BAD_SHARE = 0.5  # of the chosen frames; beyond, an answer about the clip would be a guess

Write = Callable[[memoryview | bytes, int], int]  # bytes, and their place in memory -> how many were written


def chosen_frames(
    packets: Iterable[Packet[VideoStream]],
    codec: VideoCodecContext,
    timeline: Timeline,
    picker: FramePicker[VideoFrame],
) -> Iterator[tuple[int, VideoFrame]]:
    """Each of the picker's frames, or its stand-in, with its display index; at most two frames are alive at a time.

    Decodes only the part of `packets` (the stream's, from its start) that these frames need. Raises NoEntryPoint if the
    frame of a keyframe that it has jumped to does not come out: then no frame after it can be trusted.
    """
    wanted = picker.next_wanted
    if wanted is None:
        return
    decoder = _Decoder(codec, timeline, picker.wanted)
    entry = timeline.entry_point(wanted)
    decoder.enter(entry)
    for number, packet in enumerate(chain(packets, (None,))):
        if packet is not None and number < entry.packet:
            decoder.skip(packet)
            continue
        for index, frame in decoder.decode(packet):
            yield from picker.offer(index, frame)
        if picker.next_wanted is None:
            return
        if picker.next_wanted != wanted:
            wanted = picker.next_wanted
            ahead = timeline.entry_point(wanted)
            if ahead.packet > number + 1:
                entry = ahead
                decoder.enter(entry)
                picker.forget_previous()
    if not decoder.has_entered:
        raise NoEntryPoint
    yield from picker.finish()


class NoEntryPoint(Exception):
    """A packet that calls itself a keyframe needs others before it, as where a video is refreshed stripe by stripe."""


class _Decoder:
    """The codec, which gives frames in display order, and the display index of what came out last."""

    def __init__(self, codec: VideoCodecContext, timeline: Timeline, wanted: tuple[int, ...]) -> None:
        self._codec = codec
        self._timeline = timeline
        self._wanted_ticks = {timeline.ticks[index] for index in wanted}
        self._may_skip = codec.name in _CAN_SKIP and not timeline.is_counted
        self._is_progressive = False  # known from the first frame that comes out
        self._last_index = -1
        self._skipped: dict[PktSideDataT, PacketSideData] = {}

    def enter(self, entry: EntryPoint) -> None:
        """Decode from this packet on, whatever came before."""
        self._codec.flush_buffers()
        self._first_index = entry.first_frame
        self.has_entered = entry.packet == 0  # the entry's own frame has come out

    def skip(self, packet: Packet[VideoStream]) -> None:
        """Do not decode a packet, only keep what it says of all after it."""
        self._skipped |= {kind: packet.get_sidedata(kind) for kind in _LASTING if packet.has_sidedata(kind)}

    def decode(self, packet: Packet[VideoStream] | None) -> Iterator[tuple[int, VideoFrame]]:
        """Yields the frames that come out for one packet, maybe none; None drains the codec. Raises NoEntryPoint."""
        if packet is not None:
            self._prepare(packet)
        try:
            frames = self._codec.decode(packet)
        except MemoryError:
            raise
        except av.FFmpegError:  # damaged: the picker finds a stand-in if the frame was wanted
            return
        for frame in frames:
            self._is_progressive = not frame.interlaced_frame
            if self._timeline.is_counted:
                self._last_index += 1
            elif frame.pts is not None:  # else the timeline does not have it: the frame before it lasts longer
                self._last_index = self._timeline.index_at(frame.pts)
            if self._last_index >= self._first_index:
                if not self.has_entered and self._last_index > self._first_index:
                    raise NoEntryPoint
                self.has_entered = True
                yield self._last_index, frame

    def _prepare(self, packet: Packet[VideoStream]) -> None:
        for kind, data in self._skipped.items():
            if not packet.has_sidedata(kind):
                packet.set_sidedata(data)
        self._skipped = {}
        if self._may_skip:
            # Skip frames that are neither wanted nor referred to: half the work of a usual H.264 file. Not in
            # interlaced video, where a wanted frame's second field may be a packet with a time of its own.
            is_needed = not self._is_progressive or packet.pts in self._wanted_ticks
            self._codec.skip_frame = "DEFAULT" if is_needed else "NONREF"


class LargerFrame(Exception):
    """A frame has a larger size, the arguments, than those before (recorded calls begin small): all must have it."""


class FrameConverter:
    """Writes frames upright as RGB into memory, and counts the bad ones.

    The first frame sets the orientation for all, the largest one the size: a clip has one shape. Only images are turned
    each in its own way. Frames over `max_frame_pixels` are scaled in the same pass that converts their colours.
    """

    def __init__(
        self,
        num_chosen: int,
        limits: DecodingLimits,
        write: Write,
        places: Sequence[int],
        size: tuple[int, int] | None = None,
    ) -> None:
        """`places` are those of the frames that come here, in order, among all `num_chosen` frames.

        All are scaled to `size`, as stored, if it is not that of the first one. Where other converters share the
        memory, the first frame of each must have it.
        """
        self.warnings: list[str] = []
        self.is_sound = True  # valid after `finish`
        self._num_chosen = num_chosen
        self._num_frames = len(places)
        self._places = iter(places)
        self._limits = limits
        self._write = write
        self._reformatter = VideoReformatter()  # one for all frames: each one holds buffers
        self._given_size = size
        self._source_size = self._size = (0, 0)  # as stored, and of all frames once scaled; before turning
        self.orientation = UPRIGHT
        self._num_damaged = self._num_resized = 0

    def convert(self, index: int, frame: VideoFrame, *, is_image: bool = False) -> int:
        """Convert and write one frame; returns its display index. An image has an orientation of its own.

        Raises LargerFrame for one that is larger than the size so far: all must be converted again, to its size.
        """
        self._limits.check_pixels(frame.width, frame.height)
        if 0 in self._size:
            self._prepare(frame)
        elif is_image:
            before, self.orientation = self.orientation, self._orientation_in(frame)
            if before.swap != self.orientation.swap:
                self._size, self._source_size = self._size[::-1], self._source_size[::-1]
        if not is_image and frame.width * frame.height > math.prod(self._source_size):
            raise LargerFrame(frame.width, frame.height)
        width, height = self._size
        is_scaled = width * height < frame.width * frame.height
        # The colour matrix and range that the frame states are honoured; both sizes of chroma, 8 to 12 bits.
        try:
            rgb = self._reformatter.reformat(
                frame,
                width=width,
                height=height,
                format="rgb24",
                interpolation=Interpolation.AREA if is_scaled else None,  # each source pixel counts, none aliases
                threads=1,
            )
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            fact = f"pixel format {frame.format.name}, matrix {frame.colorspace} by ITU-T H.273"
            raise VideoUnsupported(f"The video's colours cannot be converted: {fact}.", param="video") from None
        pixels = pixels_of(rotate(rgb, self.orientation))
        if self._write(pixels, len(pixels) * next(self._places)) < len(pixels):
            raise MemoryError
        self._num_damaged += frame.is_corrupt
        self._num_resized += (frame.width, frame.height) != self._source_size
        return index

    @property
    def upright_size(self) -> tuple[int, int]:
        """(width, height) of the frames in memory; zeros before the first."""
        return self.orientation.size(*self._size)

    def finish(self, num_lost: int, num_replaced: int) -> None:
        """Add to `warnings` what was wrong, also with frames that did not come; VideoUnreadable if too much was."""
        if self._num_frames == 0:
            return
        num_bad = min(num_lost + num_replaced + self._num_damaged, self._num_frames)  # one may count twice
        if num_bad > _MAX_BAD_SHARE * self._num_frames:
            raise VideoUnreadable(
                "The video is damaged, or of a kind that the decoder does not support: "
                f"{num_bad} of the {self._num_frames} chosen frames cannot be decoded.",
                param="video",
            )
        for count, fate in (
            (num_lost, "cannot be decoded and are left out."),
            (num_replaced, "cannot be decoded; neighbouring frames are used instead."),
            (self._num_damaged, "are damaged."),
            (self._num_resized, "have another size and are scaled to the largest one's."),
        ):
            if count:
                self.is_sound = False
                self.warnings.append(f"{count} of the {self._num_frames} chosen frames {fate}")

    def _prepare(self, frame: VideoFrame) -> None:
        """Set size and orientation by the first frame, and check what all frames will take."""
        size = frame.width, frame.height
        self._source_size = self._given_size or size
        if self._num_frames < self._num_chosen and self._source_size != size:
            raise VideoUnreadable("The size of the video's frames changes.", param="video")
        self._size = fitted_size(*self._source_size, self._limits.max_frame_pixels)
        self.orientation = self._orientation_in(frame)
        before, after = ("{}x{}".format(*self.orientation.size(*s)) for s in (self._source_size, self._size))
        is_scaled = self._size != self._source_size
        if is_scaled:
            self.warnings.append(f"Frames of {before} pixels are scaled down to {after}.")
        if max(self._size) > _MAX_OBLONG * min(self._size):
            fact = f"Frames of {before} pixels{f', scaled down to {after},' if is_scaled else ''} are too narrow"
            raise VideoTooLarge(
                f"{fact}: one side may be {_MAX_OBLONG} times the other at most. Crop them.", param="video"
            )
        self._limits.check_decoded_bytes(self._num_chosen, *self._size)

    def _orientation_in(self, frame: VideoFrame) -> Orientation:
        side_data = cast(SideDataContainer, _one_pixel(frame).side_data)  # PyAV's stub says otherwise
        if SideDataType.DISPLAYMATRIX not in side_data:
            return UPRIGHT
        orientation = orientation_of(bytes(side_data[SideDataType.DISPLAYMATRIX]))
        if orientation is None:
            self.warnings.append("The video's rotation is not a multiple of 90 degrees; frames are used as stored.")
        return orientation or UPRIGHT


def fitted_size(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The size itself if it has at most `max_pixels`; else the largest of its shape that does, at least 1 each."""
    if width * height <= max_pixels:
        return width, height
    shrink = math.sqrt(max_pixels / (width * height))
    wide, high = max(int(width * shrink), 1), min(max(int(height * shrink), 1), max_pixels)
    return min(wide, max_pixels // high), high  # a strip that is one pixel wide or high loses its shape


class Orientation(NamedTuple):
    """One of the eight right-angled orientations: exchange rows and columns first, then mirror."""

    swap: bool = False
    mirror_columns: bool = False
    mirror_rows: bool = False

    def size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) after turning."""
        return (height, width) if self.swap else (width, height)


UPRIGHT = Orientation()


def orientation_of(matrix: bytes) -> Orientation | None:
    """Read a display matrix (nine native int32); None if it is no multiple of 90 degrees.

    The matrix maps a stored point (x, y), y down, to (a·x + c·y, b·x + d·y).
    """
    if len(matrix) < 36:
        return None
    a, b, _, c, d = struct.unpack_from("=5i", matrix)
    if b == c == 0 and a and d:
        return Orientation(mirror_columns=a < 0, mirror_rows=d < 0)
    if a == d == 0 and b and c:
        return Orientation(swap=True, mirror_columns=c < 0, mirror_rows=b < 0)
    return None


def rotate(picture: VideoFrame, orientation: Orientation) -> VideoFrame:
    """An RGB picture, upright. Exchanging rows and columns twice changes nothing: one filter turns all."""
    if orientation == UPRIGHT:
        return picture
    directions = [orientation.mirror_columns + 2 * orientation.mirror_rows]  # what it mirrors after exchanging
    turns = directions if orientation.swap else [0, *directions]
    return _filtered(picture, [("transpose", str(each)) for each in turns])


def on_white(frame: VideoFrame) -> VideoFrame:
    """An image as a page shows it: below transparent pixels, files have any colour, often the black of what is drawn.

    Opaque pixels stay exact: those of a palette need the first step, all others a product of 16 bits.
    """
    if frame.format.has_palette or any(component.is_alpha for component in frame.format.components):
        for pixel_format in ("rgba", "gbrap16le"):
            frame = VideoReformatter().reformat(frame, format=pixel_format, threads=1)
        frame = _filtered(frame, [("negate", ""), ("premultiply", "inplace=1"), ("negate", "")])
    return frame


def _one_pixel(frame: VideoFrame) -> VideoFrame:
    """Has the frame's side data. To return it, PyAV ties its owner into a cycle, and frees a profile's name twice.

    Whole frames would stay in memory until cycles are collected: seventy of a client's own, 27 MB each.
    """
    return _filtered(frame, [("crop", "1:1:0:0:exact=1"), ("copy", ""), ("sidedata", "mode=delete:type=ICC_PROFILE")])


def _filtered(picture: VideoFrame, filters: Iterable[tuple[str, str]]) -> VideoFrame:
    graph = Graph()
    graph.threads = 1
    source = graph.add_buffer(width=picture.width, height=picture.height, format=picture.format, time_base=Fraction(1))
    graph.link_nodes(source, *(graph.add(*each) for each in filters), graph.add("buffersink")).configure()
    graph.vpush(picture)
    return graph.vpull()


def pixels_of(picture: VideoFrame) -> memoryview | bytes:
    """[H, W, 3] of an RGB picture, without what FFmpeg pads its lines with."""
    (plane,) = picture.planes
    lines, row_bytes = memoryview(plane), 3 * picture.width
    if plane.line_size == row_bytes:
        return lines
    return b"".join(lines[start : start + row_bytes] for start in range(0, len(lines), plane.line_size))
