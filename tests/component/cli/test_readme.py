"""The README's first commands, run as they stand there: every answer is right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.processes import ROOT, running
from vidspec_models.bundled.captions import parse_caption, scene_facts
from vidspec_models.bundled.description import parse_description
from vidspec_models.bundled.scene import NUMBERS, sample_scene

SEED = 3  # of the clip that the README renders


def commands() -> list[str]:
    """What the README has a reader type once the server runs."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    lines = "\n".join(blocks[1:3]).replace("\\\n", " ").splitlines()
    return [line for line in lines if line]


@pytest.mark.timeout(120)
def test_the_first_commands_are_answered_rightly(tmp_path: Path) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    server = [sys.executable, "-m", "vidspec_service", "serve", "--port", "0", "--log-format", "json"]
    with running(server) as served:

        def answer(command: str) -> str:
            typed = f"set -o pipefail; {command.replace('localhost:8000', served.url)}"
            if "vidspec chat" in command:
                typed += f" --url {served.url}"
            done = subprocess.run(["bash", "-c", typed], cwd=tmp_path, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            return done.stdout

        render, count, describe, as_json = commands()
        scene = sample_scene(SEED)
        assert f"--seed {SEED}" in render
        answer(render)
        assert answer(count).strip() == NUMBERS[len(scene.things)]
        assert parse_caption(_content(answer(describe))) == scene_facts(scene)
        assert parse_description(_content(answer(as_json))) == scene_facts(scene)


def _content(response: str) -> str:
    content: str = json.loads(response)["choices"][0]["message"]["content"]
    return content
