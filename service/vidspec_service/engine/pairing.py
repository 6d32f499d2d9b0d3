"""What the API process learns once the workers are ready: one tokenizer for both, and the facts to tell clients."""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers import Tokenizer

from vidspec_service.engine.messages import Ready
from vidspec_service.engine.roles import model_name, roles
from vidspec_service.engine.types import EngineConfig, EngineInfo
from vidspec_service.errors import ConfigError


def common_tokenizer(ready: Mapping[str, Ready]) -> Tokenizer:
    """The target's tokenizer; raises ConfigError if the draft speaks other ids, naming the first difference."""
    target = Tokenizer.from_file(ready["target"].tokenizer_file)
    if "draft" not in ready:
        return target
    theirs = Tokenizer.from_file(ready["draft"].tokenizer_file).get_vocab()
    different = sorted(set(target.get_vocab().items()) ^ set(theirs.items()))
    if different:
        token, number = different[0]
        raise ConfigError(
            f"draft and target do not share a tokenizer (first difference: token {token!r}, id {number}); "
            "choose a draft of the target's own family, or run without one (speculation off)"
        )
    return target


def engine_info(config: EngineConfig, ready: Mapping[str, Ready]) -> EngineInfo:
    """The facts about the loaded models."""
    target = ready["target"]
    names = {role: model_name(worker) for role, worker in roles(config).items()}
    return EngineInfo(
        model=config.served_name or names["target"],
        draft_model=names.get("draft"),
        context_length=min(target.context_length, config.max_context or target.context_length, config.kv_tokens),
        default_num_frames=target.default_num_frames,
        default_max_tokens=config.default_max_tokens,
        devices={role: f"{worker.device} {worker.dtype}" for role, worker in ready.items()},
        versions=target.versions,
    )
