"""Checks of a model before torch is imported: that it exists, and that its device does.

A worker needs seconds to import its libraries, and the hub's client gives up on a network after half a minute. These
checks take less than a second, plus a request to the hub for a hub id that is not in the cache. A model that passes
may still fail to load.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from vidspec_models.errors import ModelLoadError
from vidspec_models.loading.cuda_driver import find_devices
from vidspec_models.loading.files import ADAPTER, HAS_ADAPTER, find_flaw, first_line
from vidspec_models.loading.spec import BUNDLED, BUNDLED_TARGET_NAME, ModelSpec, model_path
from vidspec_models.synthetic.recipe import find_recipe

_HUB_TIMEOUT_S = 10.0


def require_loadable(spec: ModelSpec) -> None:
    """Raise ModelLoadError for a path without a checkpoint, an unavailable hub id or a missing device."""
    try:
        require_model(spec)
        require_devices(spec)
        path = Path(model_path(spec))
        if not path.is_dir():
            _require_on_hub(spec)
        elif find_recipe(str(path)) is None and (found := find_flaw(path)):
            raise ModelLoadError(f"{spec.name} {found}")
    except PermissionError as error:
        raise ModelLoadError(f"{spec.name} cannot be read by this user ({error.filename}: {error.strerror})") from None


def require_model(spec: ModelSpec) -> None:
    """Raise ModelLoadError for a path that is neither a folder nor a hub id: the hub client would try half a minute."""
    path = Path(model_path(spec))
    if spec.path in (BUNDLED, BUNDLED_TARGET_NAME) and not path.is_dir():
        raise ModelLoadError(
            f"the bundled {path.name} is missing from this installation; train it with: vidspec train-bundled"
        )
    if path.is_file():
        raise ModelLoadError(f"{spec.name} is a file; name the folder that contains it")
    if not path.is_dir() and not _is_hub_id(spec.path):
        where = f"looked for {path.absolute()}"
        raise ModelLoadError(f"{spec.name} is neither a folder ({where}) nor a hub id, which looks like owner/name")


def tokenizer_on_disk(spec: ModelSpec) -> str | None:
    """The `tokenizer.json` of a folder, or of a hub id in the cache; None if there is none yet."""
    folder = Path(model_path(spec))
    if not folder.is_dir():
        return _in_cache(spec, "tokenizer.json")
    file = folder / "tokenizer.json"
    return str(file) if file.is_file() else None


def require_devices(spec: ModelSpec) -> None:
    """Raise ModelLoadError for CUDA devices that torch would not find. "auto" always passes."""
    wanted = [name for name in spec.device.split(",") if name.startswith("cuda")]
    if not wanted:
        return
    remedy = f"or run on the CPU (--{spec.role}-device cpu)"
    if (torch := version("torch")).endswith("+cpu"):
        raise ModelLoadError(
            f"{spec.role} device {spec.device!r} does not exist: torch {torch} is built without CUDA; "
            f"install a build with it, {remedy}"
        )
    found = find_devices()
    if found is None:
        return
    for name in wanted:
        if int(name.partition(":")[2] or 0) >= found.count:
            there = f"the driver shows {found.count} CUDA devices" if found.count else found.why_none
            raise ModelLoadError(
                f"{spec.role} device {name!r} does not exist: {there}; check nvidia-smi and CUDA_VISIBLE_DEVICES, "
                f"give a container its GPUs (docker run --gpus all), {remedy}"
            )


def _is_hub_id(text: str) -> bool:
    """Checks the hub client's own rule for ids, and that the id names an owner."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, not declared

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return "/" in text


def _in_cache(spec: ModelSpec, name: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(spec.path, name, revision=spec.revision)
    return found if isinstance(found, str) else None


def _require_on_hub(spec: ModelSpec) -> None:
    """Raise ModelLoadError unless a hub id is in the cache or on the hub, and has no adapter.

    Other HTTP errors are left to the loading.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    if _in_cache(spec, ADAPTER) is not None:
        raise ModelLoadError(f"{spec.name} {HAS_ADAPTER}")
    if _in_cache(spec, "config.json") is not None:
        return
    fetch = f"download it elsewhere (hf download {spec.path} --local-dir FOLDER) and name the folder"
    try:
        found = HfApi().model_info(spec.path, revision=spec.revision, timeout=_HUB_TIMEOUT_S)
    except RepositoryNotFoundError:
        raise ModelLoadError(
            f"{spec.name} is not a local folder, and the hub shows no such model; check the id, "
            "or log in if the model is private (hf auth login)"
        ) from None
    except RevisionNotFoundError:
        raise ModelLoadError(f"{spec.name} has no revision {spec.revision!r} on the hub") from None
    except HfHubHTTPError:
        return
    except Exception as error:  # the hub client's HTTP library has its own error types
        raise ModelLoadError(
            f"{spec.name} is neither a local folder nor in the hub's cache, and the hub cannot be reached "
            f"({first_line(error)}); check id and network, or {fetch}"
        ) from error
    if any(file.rfilename == ADAPTER for file in found.siblings or ()):
        raise ModelLoadError(f"{spec.name} {HAS_ADAPTER}")
