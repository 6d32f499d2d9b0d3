"""The CUDA step's kernels in Triton's interpreter, which replaces the device."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch's CUDA builds only")
def test_the_kernels_compute_what_the_plain_walk_computes() -> None:
    command = [sys.executable, "-m", "tests.component.models.interpreted_step", "qwen2", "qwen3", "llama"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # noqa: TID251
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stderr
