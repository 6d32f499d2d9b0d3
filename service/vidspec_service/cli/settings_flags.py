"""A flag for every field of Settings, so that flags, VIDSPEC_* variables and YAML keys cannot drift apart.

Where vLLM has a flag for the same thing, its name is taken, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic.fields import FieldInfo

from vidspec_service.settings import CONFIG_VARIABLE, ENV_PREFIX, SECRETS, Settings, load_settings

S = TypeVar("S", bound=Settings)
_ABOUT = "A flag overrides its VIDSPEC_* variable, which overrides the same name in the YAML file of --config."
_VLLM_NAMES: Mapping[str, str] = {
    "max_context": "--max-model-len",
    "max_running_requests": "--max-num-seqs",
    "target_dtype": "--dtype",
}
_LISTS = frozenset({"served_model_name"})  # written as several words, as vLLM has it, or with commas


def add_settings_flags(parser: argparse.ArgumentParser, kind: type[Settings] = Settings) -> None:
    """Declare --config and one flag per setting, after the command's own flags.

    Values stay text here; Settings alone validates them. The usage names only the command's own flags: with every
    setting in it, nobody would see what stands below.
    """
    parser.usage = parser.format_usage().removeprefix("usage: ").rstrip().replace("%", "%%") + " [settings]"
    group = parser.add_argument_group("settings", _ABOUT)
    group.add_argument(
        "--config", type=Path, metavar="FILE", help=f"YAML file of settings [{CONFIG_VARIABLE}; default unset]"
    )
    for name, field in kind.model_fields.items():
        if name in SECRETS:
            continue
        flags = [f"--{name.replace('_', '-')}", *([_VLLM_NAMES[name]] if name in _VLLM_NAMES else [])]
        about = f"{field.description} [{ENV_PREFIX}{name.upper()}; default {default_text(field)}]".replace("%", "%%")
        if field.annotation is bool:
            group.add_argument(*flags, dest=name, action=argparse.BooleanOptionalAction, help=about)
        else:
            last = name.partition("_per_")[0].rpartition("_")[2]  # a maximum of requests per key is one of requests
            words: dict[str, Any] = {"nargs": "+"} if name in _LISTS else {}
            metavar = "SECONDS" if last == "s" else last.upper()
            group.add_argument(*flags, dest=name, metavar=metavar, help=about, **words)


def settings_of(kind: type[S], args: argparse.Namespace) -> S:
    """The settings that flags, environment and file make together; raises ConfigError."""
    return load_settings(kind, {name: getattr(args, name, None) for name in kind.model_fields}, args.config)


def default_text(field: FieldInfo) -> str:
    """A field's default as one would write it in a variable."""
    if field.default is None:
        return "unset"
    return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
