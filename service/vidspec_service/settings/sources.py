"""Where settings come from: flags over VIDSPEC_* environment over a YAML file. The only reader of the environment.

Every field is a flag (`--max-frames`), a variable (`VIDSPEC_MAX_FRAMES`) and a YAML key (`max_frames`). An unknown name
is an error with a suggestion, never ignored. API keys come from a setting and a file; no message repeats them.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import SecretStr, ValidationError
from pydantic_settings import EnvSettingsSource

from vidspec_service.errors import ConfigError
from vidspec_service.settings.cluster import ClusterSettings
from vidspec_service.settings.fields import ENV_PREFIX, SECRETS, Settings

S = TypeVar("S", bound=Settings)
CONFIG_VARIABLE = "VIDSPEC_CONFIG"  # the variable for --config; not a key of the file, since it names the file
# An empty value means "unset" for other settings. Here it is an error: its author expects a server that needs a key.
API_KEY_SETTINGS = SECRETS | {"api_key_file"}
MIN_KEY_LENGTH = 16  # characters
MAX_KEY_LENGTH = 256
_LINK_HINT = " (looks like a Kubernetes service link: set enableServiceLinks: false, or rename the Service)"


def load_settings(kind: type[S], flags: Mapping[str, object], config: Path | None = None) -> S:
    """Merge the three sources, or raise ConfigError with one readable line. A flag of None was not given."""
    ours = env_variables()
    _refuse_unknown_variables(ours)
    given = {name: value for name, value in flags.items() if value is not None}
    _refuse_unknown(given, "flag", kind)
    from_environment = EnvSettingsSource(kind)()
    if config is None and (named := _variable(CONFIG_VARIABLE)):
        config = Path(named)
    file_values = _read_config(config, kind) if config is not None else {}
    try:
        return kind(**{**file_values, **from_environment, **given})
    except ValidationError as error:
        raise ConfigError(_first_problem(error, given, from_environment, config)) from None


def requested_log_format(argv: Sequence[str]) -> str:
    """The log format that a command line asks for, whatever else is wrong with it, with a variable or with the file."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--log-format", nargs="?")
    parser.add_argument("--config", nargs="?", default=_variable(CONFIG_VARIABLE))
    args, _ = parser.parse_known_args(argv)
    asked = args.log_format or _variable(f"{ENV_PREFIX}LOG_FORMAT")
    if not asked and args.config:
        with contextlib.suppress(ConfigError):
            asked = _mapping_in(Path(args.config)).get("log_format")
    return str(asked or Settings.model_fields["log_format"].default)


class _Texts(yaml.SafeLoader):
    """Leaves words and numbers as text, as in variables: YAML reads `yes` as true, which is 1, 010 as 8, 1:30 as 90."""

    yaml_implicit_resolvers = {  # noqa: RUF012  an attribute of instances to the base class
        first: [(tag, form) for tag, form in forms if tag.endswith(":null")]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _mapping_in(path: Path) -> dict[str, Any]:
    text = _text_of(path, "config")
    try:
        loader = _Texts(text)
        node = loader.get_single_node()
        content = None if node is None else loader.construct_document(node)
    except Exception as error:  # beside its own, whatever making a value of a tag raises, as of `!!int "x"`
        raise ConfigError(f"the config file {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"the config file {path} must consist of `name: value` lines")
    names = [key.value for key, _ in node.value]  # of two values YAML would take the last
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{repeated} stands more than once in {path}")
    return content


def _read_config(path: Path, kind: type[Settings]) -> dict[str, Any]:
    content = _mapping_in(path)
    # A cluster's settings are known, too: its servers, and commands that ask them, may be given the same file.
    _refuse_unknown(content, f"key in {path}:", ClusterSettings)
    for name in API_KEY_SETTINGS & content.keys():
        if content[name] is None:
            raise ConfigError(f"{name} in {path} is empty: give keys, or leave it out for a server that needs none")
    return {name: value for name, value in content.items() if value is not None and name in kind.model_fields}


def _text_of(path: Path, kind: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # editors of Windows may begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the {kind} file {path}: {reason}") from None


def _refuse_unknown(names: Iterable[object], what: str, kind: type[Settings]) -> None:
    for name in names:
        if name not in kind.model_fields:
            raise ConfigError(f"unknown {what} {name}{_did_you_mean(str(name).lower().replace('-', '_'), kind)}")


def env_variables() -> dict[str, str]:
    """The environment variables that begin with our prefix."""
    found = os.environ.items()  # noqa: TID251  the owner of the environment
    return {name: value for name, value in found if name.upper().startswith(ENV_PREFIX)}


def _variable(name: str) -> str | None:
    """The value of one of them; its name may have small letters, too."""
    return next((value for given, value in env_variables().items() if given.upper() == name), None)


def _refuse_unknown_variables(ours: Mapping[str, str]) -> None:
    # A cluster's variables are known, too: every process on its machines has them in its environment.
    known = {ENV_PREFIX + name.upper() for name in ClusterSettings.model_fields} | {CONFIG_VARIABLE}
    for name, value in sorted(ours.items()):
        if name[len(ENV_PREFIX) :].lower() in API_KEY_SETTINGS and not value.strip():
            raise ConfigError(f"{name} is empty: give keys, or unset it for a server that needs none")
        if name.upper() not in known:
            link = _LINK_HINT if "_SERVICE_" in name or "_PORT_" in name else ""
            hint = _did_you_mean(name[len(ENV_PREFIX) :].lower(), ClusterSettings, as_variable=True) or link
            raise ConfigError(f"unknown environment variable {name}{hint}")


def _did_you_mean(name: str, kind: type[Settings], *, as_variable: bool = False) -> str:
    close = difflib.get_close_matches(name, kind.model_fields, n=1)
    if not close:
        return ""
    return f"; did you mean {ENV_PREFIX + close[0].upper() if as_variable else close[0]}?"


def _first_problem(
    error: ValidationError, flags: Mapping[str, object], variables: Mapping[str, object], config: Path | None
) -> str:
    problem = error.errors()[0]
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name = str(problem["loc"][0])
    if name in flags:
        where = f"--{name.replace('_', '-')}"
    elif name in variables:
        where = ENV_PREFIX + name.upper()
    else:
        where = f"{name} in {config}"
    if name in SECRETS:
        return f"{where}: {message}"
    link = _LINK_HINT if str(problem["input"]).startswith("tcp://") else ""
    return f"{where}: {message}, not {problem['input']!r}{link}"


def api_keys(settings: Settings) -> frozenset[str]:
    """All keys of both sources; empty where none are asked for. ConfigError for a bad key, file, or empty source."""
    keys: set[str] = set()
    if settings.api_keys is not None:
        given = settings.api_keys.get_secret_value().replace(",", " ").split()
        keys |= _checked(given, f"api_keys (--api-key, {ENV_PREFIX}API_KEYS)")
    if settings.api_key_file is not None:
        path = settings.api_key_file
        stripped = (line.strip() for line in _text_of(path, "API key").splitlines())
        keys |= _checked([line for line in stripped if line and not line.startswith("#")], str(path))
    return frozenset(keys)


def with_keys_read(settings: S) -> S:
    """The settings with all their keys in them: a file of keys may be a pipe, which can be read only once."""
    if not (keys := api_keys(settings)):
        return settings
    return settings.model_copy(update={"api_keys": SecretStr(" ".join(keys)), "api_key_file": None})


def client_api_key(settings: Settings) -> str | None:
    """One of the keys, for a command that asks a server with the same settings; None where there are none."""
    return min(api_keys(settings), default=None)


def _checked(keys: list[str], where: str) -> set[str]:
    if not keys:  # an operator who names a source of keys expects a server that asks for them
        raise ConfigError(f"{where} has no API key")
    for key in keys:
        if not MIN_KEY_LENGTH <= len(key) <= MAX_KEY_LENGTH or not all("!" <= char <= "~" for char in key):
            bounds = f"{MIN_KEY_LENGTH} to {MAX_KEY_LENGTH} printable ASCII characters"
            raise ConfigError(f"{where}: an API key must have {bounds} and no spaces")
    return set(keys)
