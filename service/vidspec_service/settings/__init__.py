"""Configuration: the fields, their three sources, and what the other parts are built from."""

from vidspec_service.settings.cluster import ClusterSettings, Copies
from vidspec_service.settings.derived import decoding_limits, engine_config
from vidspec_service.settings.fields import ENV_PREFIX, SECRETS, Settings
from vidspec_service.settings.sources import (
    CONFIG_VARIABLE,
    SOURCES_OF_KEYS,
    api_keys,
    client_key,
    load_settings,
    log_format_asked,
    variables,
)

__all__ = [
    "CONFIG_VARIABLE",
    "ENV_PREFIX",
    "SECRETS",
    "SOURCES_OF_KEYS",
    "ClusterSettings",
    "Copies",
    "Settings",
    "api_keys",
    "client_key",
    "decoding_limits",
    "engine_config",
    "load_settings",
    "log_format_asked",
    "variables",
]
