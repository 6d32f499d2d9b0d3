"""How many CUDA devices the driver shows, asked in a process of its own: whoever has touched a driver keeps it.

torch asks the same driver, and honours CUDA_VISIBLE_DEVICES in the same way, but takes seconds to import.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import dataclass

_LIBRARY = "libcuda.so.1"
_TIMEOUT_S = 20.0  # many devices without persistence mode wake up one after the other


@dataclass(frozen=True, slots=True)
class Devices:
    """What the driver shows."""

    count: int
    why_none: str = ""


def find_devices() -> Devices | None:
    """None if the driver does not answer: whoever loads it will see."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        count, _, why_none = done.stdout.strip().partition(" ")
        return Devices(int(count), why_none)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def ask_driver() -> Devices:
    """In this process. Calls of CUDA's driver interface return 0, or an error's number."""
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:
        return Devices(0, f"there is no NVIDIA driver ({_LIBRARY} is not found)")
    if error := driver.cuInit(0):
        return Devices(0, f"the NVIDIA driver does not start (error {error} of cuInit)")
    count = ctypes.c_int()
    if error := driver.cuDeviceGetCount(ctypes.byref(count)):
        return Devices(0, f"the NVIDIA driver shows no device (error {error} of cuDeviceGetCount)")
    return Devices(count.value, "the NVIDIA driver shows no device")


if __name__ == "__main__":
    devices = ask_driver()
    print(devices.count, devices.why_none)  # noqa: T201  its parent reads it
