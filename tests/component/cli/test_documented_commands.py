"""The commands of the README, docs/api.md and docs/operations.md, run as written: every answer is right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.api.processes import ROOT, running
from vidspec_models.bundled.captions import parse_caption, scene_facts
from vidspec_models.bundled.description import parse_description
from vidspec_models.bundled.scene import NUMBERS, sample_scene

SEED = 6  # seed of the clip that the README renders
WITHOUT, WITH = 1, 11  # seeds of two clips, the second with a red triangle
FACTS = scene_facts(sample_scene(SEED))

Typed = Callable[[str], str]


def blocks(document: str, language: str) -> list[str]:
    """The code blocks of a document that are in `language`."""
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)
    return found


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Typed]:
    """Runs a command against a dedicated server, in a folder with the files of the examples; returns its output."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("docs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    server = [sys.executable, "-m", "vidspec_service", "serve", "--port", "0", "--log-format", "json"]
    with running(server) as served:

        def run(command: str) -> str:
            asked = f"set -o pipefail; {re.sub('(http://)?localhost:8000', served.url, command)}"
            if "vidspec chat" in command:
                asked += f" --url {served.url}"
            done = subprocess.run(["bash", "-c", asked], cwd=folder, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            return done.stdout

        for name, seed in (("clip", SEED), ("first", WITHOUT), ("second", WITH)):
            run(f".venv/bin/vidspec render-clip --seed {seed} {name}.mp4")
        yield run
        served.terminate()
        assert served.wait() == 0


@pytest.mark.timeout(120)
def test_the_readmes_first_commands_are_answered_rightly(typed: Typed) -> None:
    lines = "\n".join(blocks("README.md", "sh")[1:3]).replace("\\\n", " ").splitlines()
    render, count, describe, as_json = (line for line in lines if line)
    assert f"--seed {SEED}" in render
    typed(render)
    assert typed(count).strip() == NUMBERS[len(sample_scene(SEED).things)]
    assert parse_caption(_content(typed(describe))) == FACTS
    assert parse_description(_content(typed(as_json))) == FACTS


@pytest.mark.timeout(60)
def test_an_answer_that_is_streamed_to_the_terminal_is_the_one_in_json_and_its_speed_is_told(typed: Typed) -> None:
    ask = ".venv/bin/vidspec chat clip.mp4 'Describe the video.' --max-tokens 12"
    answer = json.loads(typed(f"{ask} --json"))
    assert typed(f"{ask} 2> told") == answer["choices"][0]["message"]["content"] + "\n"
    assert typed("cat told").startswith("12 tokens, ")
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["video"]["duration_s"] == 4.0


@pytest.mark.timeout(120)
def test_the_commands_of_the_api_document_are_answered_rightly(typed: Typed) -> None:
    models, plain, streamed, as_data, which, as_json, included, completed, uploaded, kept, again = blocks(
        "docs/api.md", "sh"
    )
    for command in (models, again):
        assert json.loads(typed(command))["object"] == "list"
    assert typed(streamed).rstrip().endswith("data: [DONE]")
    video_id = json.loads(typed(uploaded))["id"]
    kept = re.sub("video-[0-9a-f]{32}", video_id, kept)
    for command in (plain, as_data, included, kept):
        assert parse_caption(_content(typed(command))) == FACTS
    things = [[f"{thing.colour} {thing.shape}" for thing in sample_scene(seed).things] for seed in (WITHOUT, WITH)]
    assert ["red triangle" in each for each in things] == [False, True]
    assert _content(typed(which)) == "second"
    assert parse_description(_content(typed(as_json))) == FACTS
    assert json.loads(typed(completed))["object"] == "text_completion"


@pytest.mark.timeout(120)
def test_the_python_of_the_api_document_prints_a_right_answer(typed: Typed) -> None:
    asked, _, responded = blocks("docs/api.md", "python")
    printed = "print('\\n---', response.output_text)"
    out = typed(f"{sys.executable} - <<'END'\n{asked}\n{responded}\n{printed}\nEND")
    told = [text.partition("CompletionUsage(")[0].strip() for text in out.split("---")]
    assert [parse_caption(text) for text in told] == [FACTS, FACTS]


def _content(response: str) -> str:
    content: str = json.loads(response)["choices"][0]["message"]["content"]
    return content


@pytest.mark.timeout(60)
def test_the_example_captions_a_folder_into_json(typed: Typed) -> None:
    (command,) = (line for line in blocks("docs/operations.md", "sh") if "caption_folder" in line)
    typed("mkdir -p clips/below && cp clip.mp4 clips/below")
    typed(f"{command.strip().replace('python', sys.executable, 1)} --url http://localhost:8000")
    assert parse_description(typed("cat captions/below/clip.mp4.json")) == FACTS


@pytest.mark.timeout(120)
def test_the_lines_of_a_batch_are_all_answered(typed: Typed) -> None:
    (lines,) = blocks("docs/operations.md", "json")
    typed(f"cp clip.mp4 a.mp4 && cat > requests.jsonl <<'END'\n{lines}END")
    typed(".venv/bin/vidspec batch requests.jsonl -o answers.jsonl --url http://localhost:8000")  # fails unless all are
    answers = map(json.loads, typed("cat answers.jsonl").splitlines())
    assert {answer["custom_id"]: answer["response"]["status_code"] for answer in answers} == {"a": 200, "b": 200}
