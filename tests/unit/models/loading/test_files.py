"""Whatever a model folder contains, the check says what is wrong and never fails itself."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vidspec_models.bundled import BUNDLED_DRAFT
from vidspec_models.loading.files import find_flaw, first_line

INDEX = "model.safetensors.index.json"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("weight_map"), inner),
)


def laid_out(folder: Path, **files: str | bytes) -> Path:
    """A folder like the bundled draft's, except for these files."""
    for file in BUNDLED_DRAFT.iterdir():
        if file.name not in files:
            (folder / file.name).symlink_to(file)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_a_whole_folder_has_no_flaw(tmp_path: Path) -> None:
    assert find_flaw(laid_out(tmp_path)) is None


def test_what_lies_beside_the_weights_is_no_flaw(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()
    assert find_flaw(laid_out(tmp_path, **{"consolidated.safetensors": b"version https://git-lfs"})) is None


def test_an_adapter_alone_or_beside_its_base_models_weights_is_told(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "adapter_config.json").write_text("{}")
    for folder in (tmp_path / "alone", laid_out(tmp_path, **{"adapter_config.json": "{}"})):
        assert (found := find_flaw(folder)) is not None
        assert "has an adapter (adapter_config.json), which is never applied; merge it" in found


def test_weights_that_are_neither_whole_nor_named_by_an_index_are_told(tmp_path: Path) -> None:
    (laid_out(tmp_path) / "model.safetensors").rename(tmp_path / "weights.safetensors")
    found = find_flaw(tmp_path)
    assert found == f"has no weights; it needs *.safetensors (model.safetensors, or files that {INDEX} names)"


def test_an_index_that_transformers_cannot_read_is_told(tmp_path: Path) -> None:
    """As some tools write it. Beside whole weights it is not read."""
    index = json.dumps({"weight_map": {"a": "weights.safetensors"}})
    (laid_out(tmp_path, **{INDEX: index}) / "weights.safetensors").symlink_to(BUNDLED_DRAFT / "model.safetensors")
    assert find_flaw(tmp_path) is None
    (tmp_path / "model.safetensors").unlink()
    found = find_flaw(tmp_path)
    assert found == f'has a {INDEX} without metadata, which transformers wants; add "metadata": {{}} to it'


@pytest.mark.parametrize("index", [json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}), "{"])
def test_an_index_that_was_left_beside_whole_weights_is_no_flaw(index: str, tmp_path: Path) -> None:
    """transformers does not read it, and itself leaves it there if it saves a model whole that was in parts before."""
    assert find_flaw(laid_out(tmp_path, **{INDEX: index})) is None


@given(content=JSON.map(json.dumps) | st.binary())
def test_any_index_that_says_nothing_of_weights_is_told(content: str | bytes) -> None:
    with TemporaryDirectory() as folder:
        (laid_out(Path(folder), **{INDEX: content}) / "model.safetensors").unlink()
        found = find_flaw(Path(folder))
    assert found is not None
    assert INDEX in found or "is missing" in found or "cannot be read" in found


@given(content=JSON.map(json.dumps) | st.binary())
def test_any_configuration_that_is_none_is_told(content: str | bytes) -> None:
    with TemporaryDirectory() as folder:
        found = find_flaw(laid_out(Path(folder), **{"config.json": content}))
    assert found == "has a config.json that is not JSON with a model_type; download it again"


SETTINGS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json",
)  # fmt: skip


@pytest.mark.parametrize("content", [b"", b'{"a": "b', b"[1]", b"null", b'\xef\xbb\xbf{"eos_token_id": 2}', b"\xff"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_settings_file_that_is_no_json_object_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    """With a byte order mark transformers reads none of them, and goes on without the generation_config.json."""
    assert (
        find_flaw(laid_out(tmp_path, **{name: content})) == f"has a {name} that is not a JSON object; download it again"
    )


@pytest.mark.parametrize("name", ["config.json", INDEX, "model.safetensors"])
def test_a_file_that_may_not_be_read_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out(tmp_path, **{INDEX: json.dumps({"weight_map": {"a": "model.safetensors"}})})
    if name == INDEX:  # beside whole weights it is not read
        (tmp_path / "model.safetensors").unlink()
    real = Path.open

    def guarded(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == name:  # simulated: root can read every file
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "open", guarded)
    assert find_flaw(tmp_path) == f"has a file that cannot be read: [Errno 13] Permission denied: '{tmp_path / name}'"


def test_a_line_that_ends_in_a_colon_comes_with_the_reason_behind_it() -> None:
    told = "Validation error for field 'hidden_size':\n    TypeError: Field 'hidden_size' expected int, got str\nmore"
    assert first_line(ValueError(told)).endswith("'hidden_size': TypeError: Field 'hidden_size' expected int, got str")
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError("\n  one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
