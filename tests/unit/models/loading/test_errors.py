"""A checkpoint that does not load: one line names the faulty file and the remedy; no weight is ever made up."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.unit.models.families.tiny_checkpoints import save
from vidspec_models.errors import ModelLoadError
from vidspec_models.loading.load_model import load_model
from vidspec_models.loading.spec import ModelSpec
from vidspec_models.reference.stock import StockGenerator
from vidspec_models.request import Turn

WEIGHTS = "model.safetensors"
STORED, UP = (f"{model}.layers.1.mlp.up_proj.weight" for model in ("language_model.model", "model.language_model"))

_CUT = {"direction": "Right", "strategy": "LongestFirst", "stride": 0, "max_length": 3}
_PADDED = {
    "direction": "Right",
    "strategy": {"Fixed": 300},
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<|endoftext|>",
}
PROJECTOR = "multi_modal_projector.linear_2.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("whole")
    save("llava_onevision", folder)
    return folder


@pytest.fixture
def broken(whole: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to break."""
    return Path(shutil.copytree(whole, tmp_path / "broken"))


def refusal(path: str | Path) -> str:
    """The error that `vidspec serve` prints."""
    with pytest.raises(ModelLoadError) as caught:
        load_model(ModelSpec(path=str(path), role="draft", device="cpu", dtype="float32"))
    text = str(caught.value)
    assert text.startswith(f"draft model {str(path)!r}")
    assert "\n" not in text
    return text


def configure(folder: Path, **changes: object) -> None:
    edit(folder / "config.json", **changes)


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def video_processor(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "processor_config.json").read_text())["video_processor"]
    return found


def text_config(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "config.json").read_text())["text_config"]
    return found


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def shard(folder: Path) -> None:
    """Split the weights into two files with an index; the second file is missing."""
    weights = load_file(folder / WEIGHTS)
    names = sorted(weights)
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    files = {name: f"model-0000{1 + (i > 9)}-of-00002.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def cut_index(folder: Path) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "mod')


def link(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder / "nothing")


def longer(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: torch.cat([weights[name], weights[name][:3]])
        for name in weights
        if name.endswith(("embed_tokens.weight", "lm_head.weight"))
    }


def narrower(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weights[name][:, :3].contiguous() for name in longer(weights)}


def cut(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "half a configuration": (lambda folder: (folder / "config.json").write_text("{"), "not JSON with a model_type"),
    "another family": (lambda folder: configure(folder, model_type="gemma3"), "'gemma3' is not supported; supported: "),
    "a family of the future": (lambda folder: configure(folder, model_type="qwen9_vl"), "'qwen9_vl' is not supported"),
    "a family in its authors' layout": (
        lambda folder: configure(folder, model_type="internvl_chat", auto_map={"AutoConfig": "own.Own"}),
        "brings its own code, which is never run; choose one in transformers' layout (InternVL: ids ending in -hf)",
    ),
    "another language model": (
        lambda folder: configure(folder, text_config=text_config(folder) | {"model_type": "granite"}),
        "language model 'granite' is not supported; supported: llama, ",
    ),
    "a shard missing": (shard, "only partly downloaded: model-00002-of-00002.safetensors is missing (1 of 2 files)"),
    "an index cut short": (cut_index, "index.json that is not JSON with a weight_map"),
    "a link to nothing": (link, "cannot be read: [Errno 2] No such file or directory: "),
    "a file cut short": (cut, "damaged or incomplete file: model.safetensors"),
    "an empty file": (
        lambda folder: (folder / WEIGHTS).write_bytes(b""),
        "damaged or incomplete file: model.safetensors",
    ),
    "a pointer": (lambda folder: (folder / WEIGHTS).write_bytes(b"version https://git-lfs.gi\n"), "run: git lfs pull"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "needs *.safetensors"),
    "pickles": (pickle, "pickles, which are never read"),
    "a tensor missing": (
        lambda folder: change_weights(folder, lambda weights: weights.pop(STORED)),
        f"tensor '{UP}' is missing from its files (1 missing in all); download it again",
    ),
    "a tensor of another shape": (
        lambda folder: change_weights(folder, lambda weights: weights.update({STORED: torch.zeros(7, 3)})),
        f"tensor '{UP}' has shape [7, 3], but config.json needs [96, 64]",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
    "no tokenizer in its file": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "has a tokenizer.json that is not a tokenizer's (Model missing. at line 1 column 2); download it again",
    ),
    "no processor": (lambda folder: (folder / "processor_config.json").unlink(), "none of processor_config.json"),
    "tokens added and not counted": (
        lambda folder: change_weights(folder, lambda weights: weights.update(longer(weights))),
        "config.json a vocab_size of",
    ),
    "words of another width": (
        lambda folder: change_weights(folder, lambda weights: weights.update(narrower(weights))),
        ", 3], but config.json needs [",
    ),
    "quantised": (
        lambda folder: configure(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "its weights are quantised (bitsandbytes), which is not supported; AWQ (gemm), GPTQ, FP8",
    ),
    "a template of text only": (
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0]['role'] }}"),
        "its chat template has no <video> for a video",
    ),
    "a template that fails": (
        lambda folder: (folder / "chat_template.jinja").write_text("{{ raise_exception('text only') }}"),
        "its chat template fails: text only",
    ),
    "an end token that is none": (
        lambda folder: edit(folder / "generation_config.json", eos_token_id=[2, 9999]),
        "names the end token 9999, but the tokenizer has tokens 0 to 267; correct eos_token_id",
    ),
    "an end token below all": (
        lambda folder: edit(folder / "generation_config.json", eos_token_id=-1),
        "names the end token -1, but the tokenizer has tokens 0 to 267; correct eos_token_id",
    ),
    "a temperature in words": (
        lambda folder: edit(folder / "generation_config.json", do_sample=True, temperature="0.7"),
        "generation_config.json has '0.7' as temperature, which must be 0 or more",
    ),
    "frames of a size that the tower does not take": (
        lambda folder: edit(folder / "processor_config.json", video_processor={**video_processor(folder), "size": 40}),
        "it cannot read a video: The size of tensor a",
    ),
    "frames of a size that is a square for squares only": (
        lambda folder: edit(
            folder / "processor_config.json",
            video_processor={**video_processor(folder), "size": {"shortest_edge": 56}},
        ),
        "it cannot read a video: The size of tensor a",
    ),
    "a number of frames in words": (
        lambda folder: edit(
            folder / "processor_config.json", video_processor={**video_processor(folder), "num_frames": "many"}
        ),
        "it cannot read a video: invalid literal for int() with base 10: 'many'; compare the processor's",
    ),
    "a weight that is no number": (
        lambda folder: change_weights(folder, lambda weights: weights[STORED].fill_(torch.nan)),
        f"what it computes is not finite: tensor '{STORED}' in model.safetensors is damaged; download it again",
    ),
    "a projector that is no number": (
        lambda folder: change_weights(folder, lambda weights: weights[PROJECTOR].fill_(torch.nan)),
        f"what it computes is not finite: tensor '{PROJECTOR}' in model.safetensors is damaged; download it again",
    ),
    "no template": (lambda folder: (folder / "chat_template.jinja").unlink(), "no chat template"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_folder_is_told_by_its_first_flaw(broken: Path, name: str) -> None:
    damage, expected = BREAKS[name]
    damage(broken)
    assert expected in refusal(broken)


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "../nothing/here", "nothing", "a/b/c"])
def test_what_can_be_no_model_is_refused_without_asking_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", None)
    assert "is neither a folder" in refusal(path)


def test_a_file_is_answered_with_its_folder(whole: Path) -> None:
    assert "name the folder" in refusal(whole / "config.json")


def test_a_hub_id_that_cannot_be_had_says_how_to_fetch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect.\nMore about that.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    assert "hf download some/model --local-dir FOLDER" in refusal("some/model")


def test_a_pinned_revision_is_asked_for_everywhere_and_nothing_is_run(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configuration, processor and weights come from one commit, as safetensors only, without the checkpoint's code."""
    model = transformers.LlavaOnevisionForConditionalGeneration
    asked: dict[object, dict[str, object]] = {}
    for kind in (transformers.AutoConfig, transformers.AutoProcessor, model):
        real = kind.from_pretrained

        def noted(path: str, kind: object = kind, real: Callable[..., object] = real, **options: object) -> object:
            asked.setdefault(kind, options)  # transformers itself makes the later calls
            return real(path, **options)

        monkeypatch.setattr(kind, "from_pretrained", noted)
    load_model(ModelSpec(path=str(whole), role="target", revision="abc123", device="cpu", dtype="float32"))
    assert len(asked) == 3
    assert all(options["revision"] == "abc123" for options in asked.values())
    assert all(asked[kind]["trust_remote_code"] is False for kind in asked if kind is not model)
    assert asked[model]["use_safetensors"] is True


@pytest.mark.parametrize("file", ["config.json", "processor_config.json"])
def test_code_that_a_checkpoint_brings_is_not_run(broken: Path, tmp_path: Path, file: str) -> None:
    ran = tmp_path / "ran"
    kind = "AutoConfig" if file == "config.json" else "AutoProcessor"
    (broken / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    settings = json.loads((broken / file).read_text())
    settings.update(auto_map={kind: "own.Own"}, processor_class="Own")
    (broken / file).write_text(json.dumps(settings))
    if file == "config.json":  # transformers has this class and uses its own
        load_model(ModelSpec(path=str(broken), role="target", device="cpu", dtype="float32"))
    else:
        assert "its own code, which is never run" in refusal(broken)
    assert not ran.exists()


def test_a_type_that_the_weights_overflow_is_told_with_the_remedy(broken: Path) -> None:
    change_weights(broken, lambda weights: weights[STORED].fill_(1e5))
    with pytest.raises(ModelLoadError, match="not finite: float16 is too small for its numbers; choose another dtype"):
        load_model(ModelSpec(path=str(broken), role="target", device="cpu", dtype="float16"))


@pytest.fixture
def in_cache(broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint to break as "some/model" in the hub's cache, offline."""
    kept = tmp_path / "models--some--model"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return Path(shutil.copytree(broken, kept / "snapshots" / "0"))


def test_a_damaged_tensor_of_a_hub_id_is_named_too(in_cache: Path) -> None:
    change_weights(in_cache, lambda weights: weights[STORED].fill_(torch.nan))
    assert f"tensor {STORED!r} in model.safetensors is damaged" in refusal("some/model")


def test_a_file_of_a_hub_id_that_is_cut_short_says_how_to_fetch_it_again(in_cache: Path) -> None:
    cut(in_cache)
    assert "in the hub's cache; download it again: hf download some/model --force-download" in refusal("some/model")


def test_a_video_whose_later_features_are_no_numbers_is_told(tmp_path: Path) -> None:
    """Those that Qwen3-VL adds behind the decoder's first layers; the others and all words are fine."""
    save("qwen3_vl", tmp_path)
    (name, *_) = sorted(name for name in load_file(tmp_path / WEIGHTS) if "deepstack_merger_list" in name)
    change_weights(tmp_path, lambda weights: weights[name].fill_(torch.nan))
    assert f"what it computes is not finite: tensor {name!r}" in refusal(tmp_path)


@pytest.mark.parametrize("step", ["loading.load_model.move_to_devices", "video_lm.VideoLM.prepare"])
def test_a_model_too_large_for_its_device_says_how_to_go_on(
    whole: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(f"vidspec_models.{step}", full)
    assert "several devices" in refusal(whole)


@pytest.mark.parametrize("step", ["loading.load_model.move_to_devices", "video_lm.VideoLM.prepare"])
def test_a_gpu_that_fails_meanwhile_is_not_the_checkpoints_fault(
    whole: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might ...")

    monkeypatch.setattr(f"vidspec_models.{step}", fail)
    told = "cannot be loaded: device 'cpu' fails with CUDA error: uncorrectable ECC error encountered"
    assert refusal(whole) == f"draft model {str(whole)!r} {told}"


@pytest.mark.parametrize("name", ["whole", "some/model"])
def test_a_gpu_that_cannot_be_used_is_told_before_the_checkpoint_is_read(
    whole: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver, or torch's build, may be too old for the other: the checkpoint is not to blame, nor the hub."""

    def refused(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: no kernel image is available\nCUDA kernel errors might ...")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "ones", refused)
    monkeypatch.setattr("vidspec_models.loading.load_model.load_config", pytest.fail)
    path = str(whole) if name == "whole" else name
    with pytest.raises(ModelLoadError) as caught:
        load_model(ModelSpec(path=path, role="draft", device="auto"))
    told = f"draft device 'cuda:0' cannot be used: CUDA error: no kernel image is available; torch {torch.__version__}"
    assert str(caught.value).startswith(told)
    assert str(caught.value).endswith("or run on the CPU (--draft-device cpu)")


def test_a_processor_that_would_contain_itself_is_told_and_loads_after_the_remedy(tmp_path: Path) -> None:
    """As transformers 4.42 to 4.51 saved a LLaVA-NeXT-Video: one file of settings, which names the image processor."""
    save("llava_next_video", tmp_path)
    processor = json.loads((tmp_path / "processor_config.json").read_text())
    settings = processor.pop("image_processor")
    del processor["video_processor"]
    (tmp_path / "processor_config.json").write_text(json.dumps(processor))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert "takes the image_processor_type in its preprocessor_config.json" in refusal(tmp_path)
    del settings["image_processor_type"]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert (
        load_model(ModelSpec(path=str(tmp_path), role="draft", device="cpu", dtype="float32")).family.default_num_frames
        == 8
    )


def test_a_context_without_room_for_a_video_is_no_flaw(broken: Path) -> None:
    configure(broken, text_config=text_config(broken) | {"max_position_embeddings": 8})
    load_model(ModelSpec(path=str(broken), role="target", device="cpu", dtype="float32"))


def test_a_template_that_lies_with_the_tokenizer_is_found(broken: Path) -> None:
    template = broken / "chat_template.jinja"
    file = broken / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template.read_text()}))
    template.unlink()
    model = load_model(ModelSpec(path=str(broken), role="target", device="cpu", dtype="float32"))
    assert model.prepare([Turn(role="user", parts=("Hello.",))], []).num_tokens > 3


def test_a_head_that_only_the_text_config_ties_is_the_embedding(whole: Path, tmp_path: Path) -> None:
    """As in released Qwen3-VL checkpoints: no head among the weights, and the outer config does not tie."""
    folder = tmp_path / "tied"
    save("qwen3_vl", folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = True
    configure(folder, text_config=config["text_config"], tie_word_embeddings=False)
    change_weights(folder, lambda weights: weights.pop("lm_head.weight"))
    spec = ModelSpec(path=str(folder), role="target", device="cpu", dtype="float32")
    load_model(spec)
    stock = StockGenerator(spec)._model  # the reference must not have a random head
    assert stock.lm_head.weight is stock.get_input_embeddings().weight


@pytest.mark.parametrize("has_one", [True, False])
def test_a_checkpoint_that_names_no_end_has_the_tokenizers_and_says_so(
    broken: Path, has_one: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (broken / "generation_config.json").unlink()
    for name, key in (("tokenizer_config.json", "eos_token"), ("special_tokens_map.json", "eos_token")):
        if (file := broken / name).exists():
            settings = json.loads(file.read_text())
            settings[key] = "<|im_end|>" if has_one else None
            file.write_text(json.dumps(settings))
    model = load_model(ModelSpec(path=str(broken), role="target", device="cpu", dtype="float32"))
    assert len(model.stop_ids) == int(has_one)
    assert ("the tokenizer's" if has_one else "every answer continues to max_tokens") in caplog.text


def test_a_target_is_told_what_its_files_ask_for_in_vain(broken: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = ModelSpec(path=str(broken), role="target", device="cpu", dtype="float32")
    load_model(spec)
    assert "is not read" not in caplog.text
    assert "tokenizer.json" not in caplog.text
    edit(broken / "generation_config.json", no_repeat_ngram_size=3)
    token = {"content": "<new>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    edit(broken / "tokenizer_config.json", added_tokens_decoder={"268": {**token, "special": False}})
    load_model(replace(spec, role="draft"))
    assert "is not read" not in caplog.text  # a draft's answers are the target's
    assert "tokenizer.json" not in caplog.text
    load_model(spec)
    assert "a generation_config.json with no_repeat_ngram_size 3, which is not read" in caplog.text
    assert "tokenizer.json that does not tell of token '<new>' what other files do (tokens in all: 1)" in caplog.text


def test_a_target_whose_tokenizer_class_reads_text_otherwise_than_its_file_is_told(
    broken: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers reads the file of a Llama tokenizer that an older version has written."""
    spec = ModelSpec(path=str(broken), role="target", device="cpu", dtype="float32")
    for lengths in ({"truncation": _CUT}, {"padding": _PADDED}):
        edit(broken / "tokenizer.json", **lengths)  # of a training's last batch: nobody uses them
        load_model(spec)
        assert "tokenizer.json" not in caplog.text
    edit(broken / "tokenizer.json", normalizer={"type": "Replace", "pattern": {"String": "  "}, "content": " "})
    edit(broken / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    load_model(spec)
    assert "tokenizer.json that makes other tokens of a text than its tokenizer_class" in caplog.text
