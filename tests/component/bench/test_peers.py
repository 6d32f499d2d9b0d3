"""Other engines on the bundled pair's weights, in real processes, give transformers' texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from vidspec_models.bundled import BUNDLED_DRAFT
from vidspec_models.bundled.scene import TEST_SEEDS
from vidspec_models.loading.spec import BUNDLED, ModelSpec
from vidspec_models.request import GenerationRequest
from vidspec_service.bench.common.child import Child
from vidspec_service.bench.common.generation import StockModel
from vidspec_service.bench.common.scenes import CAPTION_PROMPT, about_video, scene_video
from vidspec_service.bench.peers.engines import ENGINES
from vidspec_service.bench.peers.llama import write_gguf
from vidspec_service.bench.peers.pair import PromptEmbeddings, answer_with
from vidspec_service.bench.peers.report import peers_report
from vidspec_service.bench.peers.run import PeersOptions, VidspecModel, measure_peers
from vidspec_service.bench.peers.stock_language import StockLanguageModel
from vidspec_service.engine.config import EngineConfig, WorkerConfig

NUM_TOKENS = 30
PAIR = EngineConfig(target=WorkerConfig(model="bundled"), draft=WorkerConfig(model="bundled"))


def test_a_file_holds_the_checkpoints_own_numbers(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from safetensors.torch import load_file

    write_gguf(StockLanguageModel("draft"), "bf16", tmp_path / "draft.gguf")
    reader = gguf.GGUFReader(tmp_path / "draft.gguf")
    stored = load_file(BUNDLED_DRAFT / "model.safetensors")
    name = next(name for name in stored if name.endswith("layers.0.mlp.down_proj.weight"))
    found = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_down.weight")
    numbers = gguf.dequantize(found.data, found.tensor_type)
    assert np.array_equal(numbers, stored[name].float().numpy())
    num_language = sum("language_model" in name for name in stored)
    assert len(reader.tensors) == num_language > 0


@pytest.fixture(scope="module")
def request_() -> GenerationRequest:
    video = scene_video(TEST_SEEDS[0])
    return GenerationRequest(
        request_id="one", turns=about_video(CAPTION_PROMPT), videos=(video,), max_tokens=NUM_TOKENS
    )


@pytest.fixture(scope="module")
def target(request_: GenerationRequest) -> Iterator[Child[VidspecModel]]:
    with Child(VidspecModel, ModelSpec(path=BUNDLED, role="target", device="cpu", dtype="float32"), 2) as child:
        yield child


@pytest.fixture(scope="module")
def rows(target: Child[VidspecModel], request_: GenerationRequest) -> PromptEmbeddings:
    with Child(VidspecModel, ModelSpec(path=BUNDLED, role="draft", device="cpu", dtype="float32"), 2) as child:
        draft_rows = child.call(VidspecModel.embeddings, request_)
    return PromptEmbeddings(index=1, target=target.call(VidspecModel.embeddings, request_), draft=draft_rows)


@pytest.fixture(scope="module")
def expected(request_: GenerationRequest, rows: PromptEmbeddings) -> tuple[int, ...]:
    with Child(StockModel, ModelSpec(path=BUNDLED, role="target", device="cpu", dtype="float32"), 2) as child:
        assert child.call(StockModel.prefill_s, rows.target) > 0
        return child.call(StockModel.answer, request_).ids


@pytest.mark.slow
@pytest.mark.timeout(600)  # OpenVINO took minutes when both cores were busy
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("ik_llama.cpp", "bf16"),
        ("openvino", "f32"),
        ("openvino", "int8"),
        ("onnxruntime", "fp32"),
        ("onnxruntime", "int8"),
        ("assisted", "float32"),
    ],
)
def test_a_peer_says_what_transformers_says_alone_and_with_a_draft(
    target: Child[VidspecModel], rows: PromptEmbeddings, expected: tuple[int, ...], name: str, weights: str
) -> None:
    engine = ENGINES[name]
    for package in engine.packages:
        if not find_spec(package):
            pytest.skip(f"needs {package}")
    blind = replace(rows, index=0, draft=np.zeros_like(rows.draft))
    with Child(engine.make, weights, 2, target.call(VidspecModel.end_id), [blind, rows]) as child:
        for num_draft_tokens in (0, 5) if engine.runs_alone else (5,):
            found, prefill_s = child.call(answer_with, rows, NUM_TOKENS, num_draft_tokens)
            assert found.ids == expected
            assert 0 < prefill_s < found.last - found.submitted
            num_accepted, num_judged = found.speculation.num_accepted_tokens, found.speculation.num_draft_tokens
            assert num_accepted <= num_judged
            assert (num_accepted > NUM_TOKENS // 2) is (num_draft_tokens > 0)
        misled, _ = child.call(answer_with, blind, NUM_TOKENS, 5)
        assert misled.ids == expected  # although rejected tokens had to be removed from the cache
        assert misled.speculation.num_accepted_tokens < min(num_accepted, misled.speculation.num_draft_tokens)


def test_our_prefill_is_timed_alone(request_: GenerationRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # it would change this process
    model = VidspecModel(ModelSpec(path=BUNDLED, role="draft", device="cpu", dtype="float32"), 2)
    assert 0 < model.prefill_s(request_, 512) < 60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_whole_comparison() -> None:
    pytest.importorskip("ik_llama_cpp")
    options = PeersOptions(
        num_prompts=2,
        max_tokens=20,
        dtypes=("float32",),
        peers=("ik_llama.cpp", "assisted"),
        weights=("bf16",),
        draft_tokens=(4,),
    )
    found = measure_peers(options, PAIR, lambda *_: None)
    figures = peers_report(found).figures
    assert [row["name"] for row in figures["results"]] == [
        "transformers",
        "vidspec float32, off",
        "vidspec float32, parallel",
        "ik_llama.cpp bf16",
        "ik_llama.cpp bf16, 4 ahead",
        "transformers float32, 4 ahead",
    ]
    assert all(row["as_transformers"] == 2 for row in figures["results"])
    assert all(row["tokens_per_s"] > 0 and row["prefill_s"] > 0 for row in figures["results"])
