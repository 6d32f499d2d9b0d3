"""Which workers an engine consists of, the first message to each, and the facts from their Ready messages."""

from __future__ import annotations

import filecmp
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import Tokenizer

from vidspec_models.errors import ModelLoadError
from vidspec_models.loading.early_checks import require_loadable, require_model, tokenizer_on_disk
from vidspec_models.loading.spec import ModelSpec
from vidspec_service.engine.cgroups import num_cores
from vidspec_service.engine.config import EngineConfig, WorkerConfig
from vidspec_service.engine.frontend.interface import EngineInfo
from vidspec_service.engine.ipc.messages import Configure, Ready
from vidspec_service.errors import ConfigError


def worker_configs(config: EngineConfig) -> dict[str, WorkerConfig]:
    """Role to configuration; "draft" is missing where the target works alone, or needs no model to draft."""
    configs = {"target": config.target}
    if config.draft is not None and config.has_draft_model:
        configs["draft"] = config.draft
    return configs


def check_models(config: EngineConfig) -> None:
    """Raises ConfigError for missing models and devices: a check of a second, before minutes of loading."""
    _specs(config, require_loadable)


def configure_messages(config: EngineConfig) -> list[Configure]:
    """The first message of every worker; raises ConfigError for models that cannot be used, before any work."""
    configs = worker_configs(config)
    cores = num_cores()
    threads = share_cores(configs, cores)
    specs = _specs(config, require_model)
    files = {role: file for role, spec in specs.items() if (file := tokenizer_on_disk(spec)) is not None}
    if files.keys() == {"target", "draft"}:
        require_one_vocabulary(files)
    return [
        Configure(
            role=role,
            spec=specs[role],
            threads=threads[role],
            prompt_threads=worker.threads or (cores if role == "target" else threads[role]),
            engine=config,
        )
        for role, worker in configs.items()
    ]


def _specs(config: EngineConfig, check: Callable[[ModelSpec], None]) -> dict[str, ModelSpec]:
    """What each worker is to load; raises ConfigError if `check` finds something wrong."""
    specs = {role: worker.spec(role) for role, worker in worker_configs(config).items()}
    try:
        for spec in specs.values():
            check(spec)
    except ModelLoadError as error:
        raise ConfigError(str(error)) from error
    return specs


def share_cores(configs: Mapping[str, WorkerConfig], cores: int) -> dict[str, int]:
    """Threads of every worker: the draft gets one core, the target the rest, unless a worker's config says else.

    A draft step is a chain of tiny products that a second thread cannot speed up; a target step is not. (Compiled steps
    use as many of these threads as make them fastest. The target's prompts use every core, even while the draft
    computes.)
    """
    chosen = {"draft": 1, "target": max(1, cores - 1) if "draft" in configs else cores}
    return {role: worker.threads or chosen[role] for role, worker in configs.items()}


def require_one_vocabulary(files: Mapping[str, str]) -> None:
    """Raises ConfigError unless target and draft have the same token ids. `files` are their `tokenizer.json`."""
    if filecmp.cmp(files["target"], files["draft"], shallow=False):  # to read large ones takes seconds
        return
    different = sorted(_vocabulary(files["target"]) ^ _vocabulary(files["draft"]))
    if different:
        token, number = different[0]
        raise ConfigError(
            f"draft and target do not share a tokenizer (first difference: token {token!r}, id {number}); "
            "choose a draft of the target's own family, or run without one (speculation off)"
        )


def _vocabulary(file: str) -> set[tuple[str, int]]:
    try:
        return set(Tokenizer.from_file(file).get_vocab().items())
    except Exception as error:  # the library has no other type
        raise ConfigError(f"{file} is not a tokenizer's ({error}); download it again") from error


def share_gpu(target: str, draft: str) -> bool:
    """Whether two models compute on one GPU; of each, the names of its devices, separated by commas."""
    return any(device.startswith("cuda") for device in {*target.split(",")} & {*draft.split(",")})


def engine_info(config: EngineConfig, ready: Mapping[str, Ready]) -> EngineInfo:
    """The facts about the loaded models."""
    target = ready["target"]
    return EngineInfo(
        model_names=config.model_names,
        root=_root(config.target.model),
        draft_model=None if config.draft is None else config.draft.name,
        context_length=min(target.context_length, config.max_context or target.context_length, target.kv_cache_tokens),
        default_num_frames=target.default_num_frames,
        max_frames=target.max_frames,
        default_max_tokens=config.default_max_tokens,
        devices={role: f"{worker.device} {worker.dtype}" for role, worker in ready.items()},
        versions=target.versions,
        default_sampling=target.default_sampling if config.generation_config == "auto" else {},
        tool_format=target.tool_format,
        can_merge_frames=target.can_merge_frames,
        is_batch_invariant=target.is_batch_invariant,
        kv_cache_tokens={role: worker.kv_cache_tokens for role, worker in ready.items()},
        memory={role: worker.memory for role, worker in ready.items()},
    )


def _root(model: str) -> str:
    """A hub id as it is, but only the name of a folder: its path is not for clients."""
    return Path(model).name if Path(model).is_dir() else model
