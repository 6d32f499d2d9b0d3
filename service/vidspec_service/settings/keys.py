"""The API keys that callers may use, from setting and file; each is checked, and none is ever repeated."""

from __future__ import annotations

from vidspec_service.errors import ConfigError
from vidspec_service.settings.fields import ENV_PREFIX, Settings

LEAST = 16
MOST = 256


def api_keys(settings: Settings) -> frozenset[str]:
    """All keys of both sources; empty where none are asked for. ConfigError for a bad key, file, or empty source."""
    keys: set[str] = set()
    if settings.api_keys is not None:
        given = settings.api_keys.get_secret_value().replace(",", " ").split()
        keys |= _checked(given, f"{ENV_PREFIX}API_KEYS")
    if settings.api_key_file is not None:
        path = settings.api_key_file
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"cannot read the API key file {path}: {reason}") from None
        stripped = (line.strip() for line in lines)
        keys |= _checked([line for line in stripped if line and not line.startswith("#")], str(path))
    return frozenset(keys)


def client_key(settings: Settings) -> str | None:
    """One of the keys, for a command that asks a server with the same settings; None where there are none."""
    return min(api_keys(settings), default=None)


def _checked(keys: list[str], where: str) -> set[str]:
    if not keys:  # whoever names a source wants a closed server: an open one would be a bad surprise
        raise ConfigError(f"{where} has no API key")
    for key in keys:
        if not LEAST <= len(key) <= MOST or not all("!" <= char <= "~" for char in key):
            raise ConfigError(f"{where}: an API key has {LEAST} to {MOST} printable ASCII characters and no spaces")
    return set(keys)
