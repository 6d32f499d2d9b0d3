"""Turns chosen frames, one at a time, into upright RGB on the canvas, and keeps account of the bad ones."""

from __future__ import annotations

from typing import cast

from av.sidedata.sidedata import SideDataContainer
from av.sidedata.sidedata import Type as SideDataType
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter

from vidspec_service.decoding.canvas import Allocate, Canvas, fitted_size
from vidspec_service.decoding.frame_picker import FramePicker
from vidspec_service.decoding.limits import DecodingLimits
from vidspec_service.decoding.orientation import UPRIGHT, Orientation, orientation_of
from vidspec_service.decoding.reader.opening import check_pixels
from vidspec_service.errors import VideoUnreadable

# PyAV reads all of a frame's side data to give any of it, and knows fewer kinds than its FFmpeg: the EXIF data that
# cameras write into JPEG made every such frame unreadable. An unknown kind is taken for one that nobody asks for.
SideDataType._missing_ = classmethod(lambda kinds, _: kinds.SEI_UNREGISTERED)  # type: ignore[assignment]

_MAX_BAD_SHARE = 0.5  # of the chosen frames; beyond, an answer about the clip would be a guess


class Painter:
    """The first frame sets size and orientation for all; a clip has one shape.

    Frames over `max_frame_pixels` are scaled in the same pass that converts their colours.
    """

    def __init__(self, num_frames: int, limits: DecodingLimits, allocate: Allocate) -> None:
        self.warnings: list[str] = []
        self._num_frames = num_frames
        self._limits = limits
        self._allocate = allocate
        self._reformatter = VideoReformatter()  # one for all frames: each one holds buffers
        self._canvas: Canvas | None = None
        self._source_size = (0, 0)  # the first frame's
        self._num_damaged = 0
        self._num_resized = 0

    def paint(self, index: int, frame: VideoFrame) -> int:
        """Convert and lay down one frame; gives its display index back."""
        check_pixels(frame.width, frame.height, self._limits)
        if self._canvas is None:
            self._canvas = self._new_canvas(frame)
        width, height = self._canvas.stored_size
        is_scaled = width * height < frame.width * frame.height
        # The colour matrix and range that the frame states are honoured; both sizes of chroma, 8 to 12 bits.
        rgb = self._reformatter.reformat(
            frame,
            width=width,
            height=height,
            format="rgb24",
            interpolation=Interpolation.AREA if is_scaled else None,  # each source pixel counts, none aliases
            threads=1,
        )
        plane = rgb.planes[0]
        self._canvas.add(memoryview(plane), plane.line_size)
        self._num_damaged += frame.is_corrupt
        self._num_resized += (frame.width, frame.height) != self._source_size
        return index

    def finish(self, picker: FramePicker[VideoFrame]) -> tuple[int, int]:
        """Upright (width, height); `warnings` tells what was wrong. VideoUnreadable if too much was."""
        num_bad = min(picker.num_lost + picker.num_replaced + self._num_damaged, self._num_frames)  # or twice bad
        if self._canvas is None or num_bad > _MAX_BAD_SHARE * self._num_frames:
            raise VideoUnreadable(
                f"The video is damaged: {num_bad} of the {self._num_frames} chosen frames cannot be decoded.",
                param="video",
            )
        for count, fate in (
            (picker.num_lost, "cannot be decoded and are left out."),
            (picker.num_replaced, "cannot be decoded; neighbours stand in."),
            (self._num_damaged, "are damaged."),
            (self._num_resized, "have another size and are scaled to the first one's."),
        ):
            if count:
                self.warnings.append(f"{count} of the {self._num_frames} chosen frames {fate}")
        return self._canvas.upright_size

    def _new_canvas(self, frame: VideoFrame) -> Canvas:
        self._source_size = frame.width, frame.height
        size = fitted_size(*self._source_size, self._limits.max_frame_pixels)
        orientation = self._orientation(frame)
        if size != self._source_size:
            (width, height), (new_width, new_height) = orientation.size(*self._source_size), orientation.size(*size)
            self.warnings.append(f"Frames of {width}x{height} pixels are scaled down to {new_width}x{new_height}.")
        return Canvas(self._num_frames, size, orientation, self._limits, self._allocate)

    def _orientation(self, frame: VideoFrame) -> Orientation:
        side_data = cast(SideDataContainer, frame.side_data)  # PyAV's stub says otherwise
        if SideDataType.DISPLAYMATRIX not in side_data:
            return UPRIGHT
        orientation = orientation_of(bytes(side_data[SideDataType.DISPLAYMATRIX]))
        if orientation is None:
            self.warnings.append("The video asks to be turned by an odd angle; frames are used as stored.")
        return orientation or UPRIGHT
