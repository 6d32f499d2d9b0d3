"""The model package alone, as on a GPU machine with torch and transformers but without the service."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"av", "fastapi", "numba", "llvmlite", "vidspec_service"}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
import vidspec_models.families.llava, vidspec_models.families.qwen_vl
import vidspec_models.loading.load_model, vidspec_models.preservation.strategies, vidspec_models.reference.measure
"""


def test_models_load_without_video_decoding_web_server_and_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
