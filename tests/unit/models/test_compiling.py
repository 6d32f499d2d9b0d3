"""What is kept of a kernel does not outlive a change of anything that it is made of."""

from __future__ import annotations

import os
from pathlib import Path

from vidspec_models.cpu_kernels.compiling import forget_stale


def test_what_was_compiled_before_a_source_changed_is_forgotten(tmp_path: Path) -> None:
    sources, kept = tmp_path / "sources", tmp_path / "kept"
    for folder in (sources, kept):
        folder.mkdir()
    times = {sources / "tile.py": 20, sources / "kernel.py": 10, kept / "kernel.nbi": 15, kept / "kernel.1.nbc": 15}
    times |= {kept / "newer.nbi": 25, kept / "kernel.pyc": 5}
    for path, time in times.items():
        path.touch()
        os.utime(path, (time, time))
    forget_stale(kept, sources)
    assert {path.name for path in kept.iterdir()} == {"newer.nbi", "kernel.pyc"}
