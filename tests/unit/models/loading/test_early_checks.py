"""Models that cannot be loaded are refused before torch is imported; others pass without a network request."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from vidspec_models.errors import ModelLoadError
from vidspec_models.loading import early_checks
from vidspec_models.loading.cuda_driver import Devices, ask_driver, find_devices
from vidspec_models.loading.early_checks import require_devices, require_loadable, tokenizer_on_disk
from vidspec_models.loading.spec import BUNDLED, BUNDLED_TARGET_NAME, ModelSpec
from vidspec_models.synthetic.recipe import Recipe


def spec(path: str = BUNDLED, **fields: str) -> ModelSpec:
    return ModelSpec(**{"path": path, "role": "target", **fields})


def driver(monkeypatch: pytest.MonkeyPatch, devices: Devices | None, torch: str = "2.15.0+cu132") -> None:
    monkeypatch.setattr(early_checks, "find_devices", lambda: devices)
    monkeypatch.setattr(early_checks, "version", lambda _: torch)


def test_the_bundled_pair_and_random_models_pass(tmp_path: Path) -> None:
    for role in ("target", "draft"):
        require_loadable(spec(role=role, device="cpu"))
    Recipe(pair="tiny", role="target").write(tmp_path)
    require_loadable(spec(str(tmp_path)))


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"^target model '.*' has no config.json: it is not a checkpoint"):
        require_loadable(spec(str(tmp_path)))


@pytest.mark.parametrize("path", ["./models/target", "models/target/", "~/target", "../target", "gpt2", "a--b/c"])
def test_a_path_to_nothing_is_no_hub_id(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_checks, "_require_on_hub", None)
    with pytest.raises(ModelLoadError, match=r"is neither a folder .* nor a hub id, which looks like owner/name"):
        require_loadable(spec(path, device="cpu"))


@pytest.mark.parametrize("below", ["", "target"])
def test_a_folder_of_another_user_is_told_with_its_role(
    below: str, tmp_path: Path, locked_below: Callable[[Path], None]
) -> None:
    locked_below(tmp_path)
    with pytest.raises(
        ModelLoadError, match=rf"^draft model '{tmp_path / below}' cannot be read by this user \(/.*: Per"
    ):
        require_loadable(spec(str(tmp_path / below), role="draft", device="cpu"))


@pytest.mark.parametrize("path", [BUNDLED, BUNDLED_TARGET_NAME])
def test_an_installation_without_the_bundled_pair_says_how_to_make_it(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vidspec_models.loading.spec.BUNDLED_TARGET", tmp_path / "target")
    with pytest.raises(ModelLoadError, match=r"the bundled target is missing .* vidspec train-bundled"):
        require_loadable(spec(path, device="cpu"))


def test_a_device_that_is_there_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, Devices((10, 20)))
    for names in ("cuda", "cuda:1", "cuda:0,cuda:1", "auto", "cpu"):
        require_devices(spec(device=names))


def test_a_model_that_is_there_needs_its_device_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, Devices((10,)))
    with pytest.raises(ModelLoadError, match="target device 'cuda:1' does not exist"):
        require_loadable(spec(device="cuda:1"))


def test_one_that_is_not_is_refused_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, Devices((10, 20)))
    with pytest.raises(ModelLoadError, match=r"^draft device 'cuda:2' does not exist: the driver shows 2 CUDA devices"):
        require_devices(spec(role="draft", device="cuda:1,cuda:2"))


def test_a_machine_without_a_driver_says_so_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, Devices((), "there is no NVIDIA driver"))
    with pytest.raises(ModelLoadError, match=r"there is no NVIDIA driver;.*--gpus all.*--target-device cpu"):
        require_devices(spec(device="cuda"))


def test_a_torch_without_cuda_is_told_before_any_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, Devices((10,)), torch="2.15.0+cpu")
    with pytest.raises(ModelLoadError, match=r"torch 2.15.0\+cpu is built without CUDA"):
        require_devices(spec(device="cuda"))


def test_a_driver_that_does_not_answer_is_left_to_whoever_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, None)
    require_devices(spec(device="cuda:7"))


class Driver:
    """The part of libcuda that is used."""

    def __init__(self, count: int, error: int = 0) -> None:
        self._count, self._error = count, error

    def cuInit(self, _: int) -> int:
        return self._error

    def cuDeviceGetCount(self, count: object) -> int:
        count._obj.value = self._count  # type: ignore[attr-defined]
        return 0

    def cuDeviceGet(self, device: object, number: int) -> int:
        device._obj.value = number  # type: ignore[attr-defined]
        return 0

    def cuDeviceTotalMem_v2(self, num_bytes: object, device: ctypes.c_int) -> int:
        num_bytes._obj.value = 2**30 * (1 + device.value)  # type: ignore[attr-defined]
        return 0


def test_the_driver_is_asked_for_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(3))
    assert ask_driver().total_bytes == (2**30, 2 * 2**30, 3 * 2**30)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(3, error=999))
    assert ask_driver() == Devices((), "the NVIDIA driver does not start (error 999 of cuInit)")


def test_the_question_is_asked_in_another_process_and_a_broken_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_devices()
    assert found is not None
    if not os.path.exists("/dev/nvidiactl"):
        assert found.count == 0
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="Segmentation fault"))
    assert find_devices() is None


@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("python", 20), subprocess.CalledProcessError(1, "python")])
def test_a_driver_that_hangs_or_crashes_has_no_answer(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    assert find_devices() is None


def hub(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, cached: str | None = None, there: Sequence[str] = ()
) -> None:
    """The cache has the file `cached` only; the hub raises `error`, or lists the files `there`."""

    def answer(*_: object, **__: object) -> object:
        if error is not None:
            raise error
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in there])

    def load(_: str, name: str, revision: str | None) -> str | None:
        return cached if cached is not None and Path(cached).name == name else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", load)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(model_info=answer))


@pytest.mark.parametrize("cached", [None, "/cache/tokenizer.json"])
def test_the_tokenizer_of_a_hub_id_is_on_disk_if_it_is_in_the_cache(
    cached: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(monkeypatch, None, cached)
    assert tokenizer_on_disk(spec("owner/name")) == cached


def test_a_tokenizer_that_the_cache_knows_not_to_exist_is_not_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, None)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: huggingface_hub._CACHED_NO_EXIST)
    assert tokenizer_on_disk(spec("owner/name")) is None


def test_the_tokenizer_of_a_folder_is_on_disk_if_it_is_there(tmp_path: Path) -> None:
    """A model with random weights has none."""
    assert tokenizer_on_disk(spec(str(tmp_path))) is None
    (tmp_path / "tokenizer.json").touch()
    assert tokenizer_on_disk(spec(str(tmp_path))) == str(tmp_path / "tokenizer.json")


def http_error(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub.example/api/models/a/b"))
    return kind("what the hub says", response=response)  # type: ignore[arg-type]  # its client bundles httpx


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (http_error(RepositoryNotFoundError, 404), "the hub shows no such model; check the id"),
        (http_error(RevisionNotFoundError, 404), "has no revision 'abc' on the hub"),
        (
            httpx.ConnectError("Name or service not known"),
            r"cannot be reached \(Name or service not known\).*hf download",
        ),
        (ConnectionError("offline mode is enabled"), r"nor in the hub's cache.*offline mode is enabled"),
    ],
)
def test_a_hub_id_that_cannot_be_had_is_refused(
    error: Exception, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(monkeypatch, error)
    with pytest.raises(ModelLoadError, match=expected):
        require_loadable(spec("org/model", revision="abc"))


def test_a_hub_that_is_busy_is_left_to_the_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, http_error(HfHubHTTPError, 503))
    require_loadable(spec("org/model"))


def test_what_is_in_the_cache_needs_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, ConnectionError("no network"), cached="/cache/config.json")
    require_loadable(spec("org/model"))


@pytest.mark.parametrize("there", [["adapter_config.json"], ["config.json", "adapter_config.json"]])
def test_an_adapter_on_the_hub_is_refused_before_it_is_downloaded(
    there: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(monkeypatch, None, there=there)
    with pytest.raises(ModelLoadError, match=r"^target model 'org/model' has an adapter .*; merge it"):
        require_loadable(spec("org/model"))
    hub(monkeypatch, None, there=["config.json", "model.safetensors"])
    require_loadable(spec("org/model"))


def test_an_adapter_in_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, ConnectionError("no network"), cached="/cache/adapter_config.json")
    with pytest.raises(ModelLoadError, match=r"^target model 'org/model' has an adapter .*; merge it"):
        require_loadable(spec("org/model"))


def test_none_of_it_imports_torch(tmp_path: Path) -> None:
    """It also releases the driver: the API process must hold neither."""
    code = (
        "import sys; from vidspec_models.loading.early_checks import *\n"
        "spec = lambda **f: ModelSpec(role='target', **f)\n"
        f"for given in (spec(path='bundled'), spec(path='bundled', device='cuda:99'), spec(path={str(tmp_path)!r})):\n"
        "    try: require_loadable(given)\n"
        "    except Exception: pass\n"
        "print(*sys.modules, '/libcuda.so' in open('/proc/self/maps').read())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    *modules, has_driver = done.stdout.split()
    assert "torch" not in modules
    assert has_driver == "False"
