"""Draft and target must have the same token ids; the refusal says where they differ and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs
from tokenizers import Tokenizer, models

from tests.fakes import MEMORY
from vidspec_models.request import ToolFormat
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.frontend.workers import (
    configure_messages,
    engine_info,
    require_one_vocabulary,
    share_gpu,
)
from vidspec_service.engine.ipc.messages import Ready
from vidspec_service.errors import ConfigError


def ready(folder: Path, name: str, words: list[str], room: int = 1000) -> Ready:
    path = folder / f"{name}.json"
    Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])).save(str(path))
    return Ready(
        context_length=100,
        kv_cache_tokens=room,
        default_num_frames=8,
        device="cpu",
        dtype="float32",
        tokenizer_file=str(path),
        is_batch_invariant=True,
        memory=MEMORY,
        versions={},
    )


def vocabulary_of(folder: Path, **words: list[str]) -> dict[str, str]:
    return {role: ready(folder, role, each).tokenizer_file for role, each in words.items()}


def test_equal_vocabularies_pair_up(tmp_path: Path) -> None:
    files = vocabulary_of(tmp_path, target=["a", "b"], draft=["a", "b"])
    require_one_vocabulary(files)
    Path(files["draft"]).write_text(Path(files["draft"]).read_text() + "\n")
    require_one_vocabulary(files)


def test_the_first_different_token_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"token 'b', id 1.*speculation off"):
        require_one_vocabulary(vocabulary_of(tmp_path, target=["a", "b"], draft=["a", "c"]))


def test_a_file_that_is_no_tokenizers_is_named(tmp_path: Path) -> None:
    files = vocabulary_of(tmp_path, target=["a", "b"], draft=["a", "b"])
    Path(files["draft"]).write_text("{}")
    with pytest.raises(ConfigError, match=r"draft\.json is not a tokenizer's \(.*download it again"):
        require_one_vocabulary(files)


def test_folders_with_different_tokenizers_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    for role, words in {"target": ["a", "b"], "draft": ["a", "c"]}.items():
        (tmp_path / role).mkdir()
        Path(ready(tmp_path, role, words).tokenizer_file).rename(tmp_path / role / "tokenizer.json")
    target, draft = (WorkerConfig(model=str(tmp_path / role)) for role in ("target", "draft"))
    with pytest.raises(ConfigError, match="do not share a tokenizer"):
        configure_messages(EngineConfig(target=target, draft=draft))
    (tmp_path / "draft" / "tokenizer.json").unlink()
    assert len(configure_messages(EngineConfig(target=target, draft=draft))) == 2


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        ("cuda:0", "cuda:0", True),
        ("cuda:0,cuda:1", "cuda:1", True),
        ("cuda:1", "cuda:0", False),
        ("cuda:1", "cuda:10", False),
        ("cpu", "cpu", False),
        ("cuda:0", "cpu", False),
    ],
)
def test_two_models_share_a_gpu_if_one_of_its_devices_is_the_others(target: str, draft: str, expected: bool) -> None:
    assert share_gpu(target, draft) is expected


def test_the_frontend_is_told_what_the_target_says_of_itself(tmp_path: Path) -> None:
    said = structs.replace(
        ready(tmp_path, "target", ["a"]),
        default_num_frames=5,
        max_frames=6,
        versions={"torch": "2.15"},
        default_sampling={"top_k": 7},
        tool_format=ToolFormat.HERMES,
        can_merge_frames=True,
        is_batch_invariant=False,
    )
    info = engine_info(EngineConfig(target=WorkerConfig(model="bundled")), {"target": said})
    told = {field: getattr(info, field) for field in structs.asdict(said) if hasattr(info, field)}
    assert told | {"kv_cache_tokens": 1000, "memory": MEMORY} == {field: getattr(said, field) for field in told}


def test_the_context_is_the_least_of_model_operator_and_cache(tmp_path: Path) -> None:
    config = EngineConfig(target=WorkerConfig(model="bundled"), max_context=80)
    assert engine_info(config, {"target": ready(tmp_path, "target", ["a"], room=60)}).context_length == 60
    assert engine_info(config, {"target": ready(tmp_path, "target", ["a"])}).context_length == 80
