"""Which CUDA devices the driver shows, asked in a subprocess: a process cannot unload a driver that it has used.

torch asks the same driver, and honours CUDA_VISIBLE_DEVICES in the same way, but takes seconds to import.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass

_LIBRARY = "libcuda.so.1"
_TIMEOUT_S = 20.0  # many devices without persistence mode wake up one after the other


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that the driver shows."""

    total_bytes: tuple[int, ...]  # memory of each device
    why_none: str = ""

    @property
    def count(self) -> int:
        return len(self.total_bytes)


def find_devices() -> Devices | None:
    """None if the driver does not answer: then the error shows when a model is loaded."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        total_bytes, why_none = json.loads(done.stdout)
        return Devices(tuple(total_bytes), why_none)
    except (OSError, ValueError, TypeError, subprocess.SubprocessError):
        return None


def ask_driver() -> Devices:
    """Ask in this process. Calls of CUDA's driver API return 0 or an error number."""
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:
        return Devices((), f"there is no NVIDIA driver ({_LIBRARY} is not found)")
    if error := driver.cuInit(0):
        return Devices((), f"the NVIDIA driver does not start (error {error} of cuInit)")
    count = ctypes.c_int()
    if error := driver.cuDeviceGetCount(ctypes.byref(count)):
        return Devices((), f"the NVIDIA driver shows no device (error {error} of cuDeviceGetCount)")
    sizes = []
    for number in range(count.value):
        device, num_bytes = ctypes.c_int(), ctypes.c_size_t()
        driver.cuDeviceGet(ctypes.byref(device), number)
        driver.cuDeviceTotalMem_v2(ctypes.byref(num_bytes), device)
        sizes.append(num_bytes.value)
    return Devices(tuple(sizes), "the NVIDIA driver shows no device")


if __name__ == "__main__":
    devices = ask_driver()
    print(json.dumps([devices.total_bytes, devices.why_none]))  # noqa: T201  its parent reads it
