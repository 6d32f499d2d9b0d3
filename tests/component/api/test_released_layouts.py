"""Tiny checkpoints in the layout of released ones, served over HTTP: every mode gives the text of stock `generate`.

Released folders differ from those that transformers writes today: shards and their index, a flat configuration,
separate files for image and video settings, a chat template in the place used at the time, and, in Qwen's, a generation
configuration that samples from a few tokens or penalises repetition.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.api.processes import running
from tests.clips import write_video
from tests.component.decoding.reading import read
from tests.unit.models.families.tiny_checkpoints import FAMILIES, save
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.reference.stock import StockGenerator
from vidspec_models.request import VIDEO, SpeculationMode, Turn, Video
from vidspec_service.decoding.clip import FrameRequest
from vidspec_service.engine.frontend.tokens import LogprobsProcessor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ANSWER = 24
FLAT = ("qwen2_vl", "qwen2_5_vl")
TEMPLATE_WITH_TOKENIZER = ("qwen2_vl", "qwen3_vl")
SAMPLING = {
    "qwen2_vl": {"temperature": 0.01, "top_p": 0.001, "top_k": 1},
    "qwen2_5_vl": {"temperature": 1e-6, "repetition_penalty": 1.05},
    "qwen3_vl": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
}
QUESTIONS = ("What moves?", "And then what?")


def lay_out_as_released(name: str, folder: Path) -> None:
    """Rewrite the files that `save` wrote."""
    _shard(folder, {"vision_tower.": "vision_tower.vision_model."} if name.startswith("llava") else {})
    processor = _take(folder, "processor_config.json")
    _write(folder, "preprocessor_config.json", processor.pop("image_processor"))
    _write(folder, "video_preprocessor_config.json", processor.pop("video_processor"))
    _write(folder, "processor_config.json", processor)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    if name in TEMPLATE_WITH_TOKENIZER:
        _write(folder, "tokenizer_config.json", _take(folder, "tokenizer_config.json") | {"chat_template": template})
    else:
        _write(folder, "chat_template.json", {"chat_template": template})
    if name in FLAT:
        config = _take(folder, "config.json")
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        old = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
        _write(folder, "config.json", {**text, **old, **config})
    if name in SAMPLING:
        said = {"do_sample": True, **SAMPLING[name]}
        _write(folder, "generation_config.json", _take(folder, "generation_config.json") | said)


def _shard(folder: Path, renamed: dict[str, str]) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for new, old in renamed.items():
        weights = {old + key.removeprefix(new) if key.startswith(new) else key: weights[key] for key in weights}
    files = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    places = {key: files[number % len(files)] for number, key in enumerate(weights)}
    for file in files:
        save_file({key: weights[key] for key in weights if places[key] == file}, folder / file, {"format": "pt"})
    total = sum(value.nbytes for value in weights.values())
    _write(folder, "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def _take(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def _write(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(content))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    noise = np.random.default_rng(5).integers(0, 256, (12, 57, 85, 3), dtype=np.uint8)
    return write_video(tmp_path_factory.mktemp("clip") / "clip.mkv", noise, codec="ffv1", pix_fmt="bgr0", rate=4)


def frames_of(path: Path, num_frames: int) -> Video:
    """The frames that the server decodes, in memory that may be written, as torch wants it of processors."""
    video = read(path, FrameRequest(num_frames=num_frames)).video
    return replace(video, frames=video.frames.copy())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_mode_says_over_http_what_generate_says(name: str, tmp_path: Path, clip: Path) -> None:
    for role, noise in (("target", 0.0), ("draft", 0.02)):
        save(name, tmp_path / role, noise=noise, loud_padding=role == "draft")
        lay_out_as_released(name, tmp_path / role)
    stock = StockGenerator(ModelSpec(path=str(tmp_path / "target"), role="target", device="cpu", dtype="float32"))
    spelled = LogprobsProcessor(Tokenizer.from_file(str(tmp_path / "target" / "tokenizer.json")))
    wanted = {}
    for num_frames, question in enumerate(QUESTIONS, 3):
        turn = Turn(role="user", parts=(VIDEO, question))
        ids = stock.answer([turn], [frames_of(clip, num_frames)], ANSWER).ids
        wanted[num_frames] = [spelled.bytes_of(token) for token in ids]
    flags = [
        f"--model={tmp_path / 'target'}",
        f"--draft-model={tmp_path / 'draft'}",
        "--draft-dtype=float32",
        "--target-dtype=float32",
    ]
    with running([sys.executable, "-m", "vidspec_service", "serve", "--port=0", "--log-format=json", *flags]) as server:
        for mode in SpeculationMode:
            for num_frames, question in enumerate(QUESTIONS, 3):
                assert asked(server.url, clip, question, num_frames, mode) == wanted[num_frames], (mode, question)


def asked(url: str, clip: Path, question: str, num_frames: int, mode: SpeculationMode) -> list[bytes]:
    """The bytes of each token."""
    form = {"prompt": question, "num_frames": str(num_frames), "max_tokens": str(ANSWER), "temperature": "0"}
    form |= {"logprobs": "true", "speculation": mode.value}
    files = {"video": ("clip.mkv", clip.read_bytes(), "video/x-matroska")}
    response = httpx.post(f"{url}/v1/video-chat", data=form, files=files, timeout=120)
    assert response.status_code == httpx.codes.OK, response.text
    return [bytes(token["bytes"]) for token in response.json()["choices"][0]["logprobs"]["content"]]
