"""The other libraries, each as a function from a file and frame numbers to RGB pictures; imported only when called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vidspec_service.bench.decode.options import Reader

Pictures = list[NDArray[np.uint8]]  # each [H, W, 3]
Read = Callable[[str, Sequence[int]], Pictures]
MODULES = {
    Reader.OPENCV: "cv2",
    Reader.OPENCV_SEEK: "cv2",
    Reader.TORCHCODEC: "torchcodec",
    Reader.DECORD: "decord",
}


def is_installed(reader: Reader) -> bool:
    """Whether its module can be found; it may still fail to load, say without FFmpeg's libraries."""
    return reader.is_ours or find_spec(MODULES[reader]) is not None


def library(reader: Reader) -> Read:
    """The reader, its library loaded. Raises what the library does."""
    return {
        Reader.OPENCV: _opencv,
        Reader.OPENCV_SEEK: _opencv_seeking,
        Reader.TORCHCODEC: _torchcodec,
        Reader.DECORD: _decord,
    }[reader](_module(reader))


def library_version(reader: Reader) -> str:
    """As the library says."""
    return str(_module(reader).__version__)


def _module(reader: Reader) -> Any:
    return import_module(MODULES[reader])


def _opencv(cv2: Any) -> Read:
    def read(path: str, indices: Sequence[int]) -> Pictures:
        capture = cv2.VideoCapture(path)
        wanted, pictures = set(indices), []
        for index in range(indices[-1] + 1):
            capture.grab()
            if index in wanted:
                pictures.append(_rgb(cv2, capture.retrieve()))
        capture.release()
        return pictures

    return read


def _opencv_seeking(cv2: Any) -> Read:
    def read(path: str, indices: Sequence[int]) -> Pictures:
        capture = cv2.VideoCapture(path)
        pictures = []
        for index in indices:
            capture.set(cv2.CAP_PROP_POS_FRAMES, index)
            pictures.append(_rgb(cv2, capture.read()))
        capture.release()
        return pictures

    return read


def _rgb(cv2: Any, result: tuple[bool, Any]) -> NDArray[np.uint8]:
    is_there, picture = result
    if not is_there:
        raise ValueError("a frame is missing")
    rgb: NDArray[np.uint8] = cv2.cvtColor(picture, cv2.COLOR_BGR2RGB)
    return rgb


def _torchcodec(_: Any) -> Read:
    decoders = import_module("torchcodec.decoders")

    def read(path: str, indices: Sequence[int]) -> Pictures:
        decoder = decoders.VideoDecoder(path, dimension_order="NHWC")
        return list(decoder.get_frames_at(list(indices)).data.numpy())

    return read


def _decord(decord: Any) -> Read:
    def read(path: str, indices: Sequence[int]) -> Pictures:
        return list(decord.VideoReader(path).get_batch(list(indices)).asnumpy())

    return read
