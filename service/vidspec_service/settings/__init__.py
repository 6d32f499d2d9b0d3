"""Configuration: the fields, their three sources, and what the other parts are built from."""

from vidspec_service.settings.cluster import ClusterSettings, ReplicaRange
from vidspec_service.settings.derived import decoding_limits, engine_config
from vidspec_service.settings.fields import ENV_PREFIX, SECRETS, Settings
from vidspec_service.settings.sources import (
    CONFIG_VARIABLE,
    api_keys,
    client_api_key,
    env_variables,
    load_settings,
    requested_log_format,
    with_keys_read,
)

__all__ = [
    "CONFIG_VARIABLE",
    "ENV_PREFIX",
    "SECRETS",
    "ClusterSettings",
    "ReplicaRange",
    "Settings",
    "api_keys",
    "client_api_key",
    "decoding_limits",
    "engine_config",
    "env_variables",
    "load_settings",
    "requested_log_format",
    "with_keys_read",
]
