"""Settings: three sources in order of precedence, enforced limits, and errors that are reported once."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from vidspec_models.bundled import BUNDLED_TARGET
from vidspec_models.loading.spec import ModelSpec, model_path
from vidspec_models.request import SpeculationMode
from vidspec_service.decoding.clip import DecodingLimits
from vidspec_service.engine.config import WorkerConfig
from vidspec_service.errors import ConfigError
from vidspec_service.settings import Settings, decoding_limits, engine_config, load_settings, requested_log_format


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "vidspec.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(flags: dict[str, object], path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(Settings, flags, path)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_without_any_source_the_defaults_hold() -> None:
    settings = load_settings(Settings, {})
    assert settings == Settings()
    assert (settings.port, settings.model, settings.speculation) == (8000, "bundled", SpeculationMode.AUTO)


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = config(tmp_path, "port: 1\nmax_frames: 2\nspeculation: serial\nhost: null\n")
    monkeypatch.setenv("VIDSPEC_PORT", "3")
    monkeypatch.setenv("VIDSPEC_MAX_FRAMES", "4")
    settings = load_settings(Settings, {"port": 5, "max_frames": None}, path)
    assert (settings.port, settings.max_frames, settings.speculation) == (5, 4, SpeculationMode.SERIAL)
    assert settings.host == "127.0.0.1"


def test_the_file_may_be_named_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIDSPEC_CONFIG", str(config(tmp_path, "port: 1")))
    assert load_settings(Settings, {}).port == 1
    assert load_settings(Settings, {}, config(tmp_path, "port: 2")).port == 2


def test_the_variable_that_names_the_file_may_have_small_letters_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("vidspec_config", str(config(tmp_path, "port: 1\nlog_format: json")))
    assert load_settings(Settings, {}).port == 1
    assert requested_log_format([]) == "json"
    monkeypatch.setenv("vidspec_log_format", "text")
    assert requested_log_format([]) == "text"


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIDSPEC_PORT", "")
    monkeypatch.setenv("VIDSPEC_SERVED_MODEL_NAME", "")
    settings = load_settings(Settings, {})
    assert (settings.port, settings.served_model_name) == (8000, None)


@pytest.mark.parametrize("word", ["off", "'off'", "Off"])
def test_speculation_is_off_though_yaml_reads_that_as_false(tmp_path: Path, word: str) -> None:
    assert load_settings(Settings, {}, config(tmp_path, f"speculation: {word}")).speculation is SpeculationMode.OFF
    assert load_settings(Settings, {"speculation": False}).speculation is SpeculationMode.OFF  # as Ray Serve reads it
    assert "not 'on'" in refusal({}, config(tmp_path, "speculation: on"))


def test_words_and_numbers_in_the_file_are_read_as_in_variables(tmp_path: Path) -> None:
    """YAML has a meaning of its own for all of these."""
    settings = load_settings(Settings, {}, config(tmp_path, "revision: 0123456\nport: 010\nmetrics: no\nhost: no\n"))
    assert (settings.revision, settings.port, settings.metrics, settings.host) == ("0123456", 10, False, "no")
    for line in ("port: yes", "video_ttl_s: 1:30", "max_frames: true"):
        assert f"not {line.split(maxsplit=1)[1]!r}" in refusal({}, config(tmp_path, line))


def test_building_settings_reads_nothing_but_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIDSPEC_PORT", "1")
    assert Settings().port == 8000


def test_every_field_can_be_set_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"upload_dir": "~/up", "access_log": "no", "log_level": "DEBUG", "keep_alive_s": "0.5"}
    values |= {"max_queued_requests": "0", "otlp_traces_endpoint": "http://collector:4318/v1/traces"}
    for name, value in values.items():
        monkeypatch.setenv(f"VIDSPEC_{name.upper()}", value)
    settings = load_settings(Settings, {})
    assert settings.upload_dir == Path.home() / "up"
    assert settings.access_log is False
    assert (settings.log_level, settings.keep_alive_s, settings.max_queued_requests) == ("debug", 0.5, 0)
    assert settings.otlp_traces_endpoint == values["otlp_traces_endpoint"]


def test_a_path_with_a_home_that_is_not_known_is_refused() -> None:
    assert "--api-key-file: expected a path whose ~ stands for a folder" in refusal({"api_key_file": "~nobody-x/keys"})


def test_an_empty_path_is_refused_and_is_not_the_working_folder(tmp_path: Path) -> None:
    assert "--upload-dir: expected a path, not ''" in refusal({"upload_dir": ""})
    assert "expected a path, not ''" in refusal({}, config(tmp_path, "api_key_file: ''"))
    assert "expected a path, not" in refusal({}, config(tmp_path, 'upload_dir: "/tmp/a\\0b"'))


def test_every_field_says_what_it_is() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("VIDSPEC_MAX_UPLOD_BYTES", "VIDSPEC_MAX_UPLOD_BYTES; did you mean VIDSPEC_MAX_UPLOAD_BYTES"),
        ("VIDSPEC_ZZZ", "unknown environment variable VIDSPEC_ZZZ$"),
        ("vidspec_prt", "vidspec_prt; did you mean VIDSPEC_PORT"),
        ("VIDSPEC_PORT_8000_TCP_ADDR", "enableServiceLinks: false"),
        ("VIDSPEC_SERVICE_HOST", "unknown environment variable VIDSPEC_SERVICE_HOST"),
    ],
)
def test_an_unknown_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.setenv(name, "1")
    assert re.search(message, refusal({}))


def test_an_unknown_flag_is_an_error() -> None:
    assert refusal({"prot": 1}) == "unknown flag prot; did you mean port?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-frames: 3", "max-frames; did you mean max_frames?"),
        ("config: x", "config"),
        ("3: 4", "3"),
        ("- port", "`name: value` lines"),
        ("port: [", "is not YAML"),
        ('port: !!int "x"', "is not YAML: invalid literal for int()"),
        ("port: !!bool maybe", "is not YAML"),
        ("port: !!timestamp x", "is not YAML"),
        ("port: " + 2000 * "[", "is not YAML: maximum recursion depth exceeded"),
        ("port: many", "port in "),
        ("port: x", "port in "),
        ("port: 1\nport: 2", "port stands more than once"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    path = config(tmp_path, text)
    told = refusal({}, path)
    assert message in told
    assert str(path) in told


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    assert "No such file" in refusal({}, tmp_path / "none.yaml")
    assert "Is a directory" in refusal({}, tmp_path)
    (tmp_path / "latin").write_bytes(b"host: caf\xe9")
    assert "not UTF-8" in refusal({}, tmp_path / "latin")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load_settings(Settings, {}, config(tmp_path, "# nothing\n")) == Settings()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": 65536}, "--port: "),
        ({"host": "0.0.0.0\r"}, r"--host: String should match pattern '^\S+$', not '0.0.0.0\r'"),
        ({"target_threads": 10**5}, "--target-threads: Input should be less than or equal to 4096"),
        ({"draft_threads": 10**5}, "--draft-threads: Input should be less than or equal to 4096"),
        ({"decode_workers": 10**5}, "--decode-workers: Input should be less than or equal to 4096"),
        ({"max_running_requests": 0}, "--max-running-requests: "),
        ({"max_queued_requests": -1}, "--max-queued-requests: "),
        ({"max_decoded_bytes": 10**18}, "--max-decoded-bytes: Input should be less than or equal to 1000000000000000"),
        ({"max_cached_feature_bytes": 10**20}, "--max-cached-feature-bytes: "),
        ({"request_timeout_s": 0}, "--request-timeout-s: "),
        ({"request_timeout_s": "inf"}, "--request-timeout-s: "),
        ({"request_timeout_s": "nan"}, "--request-timeout-s: "),
        ({"keep_alive_s": 1e-9}, "--keep-alive-s: Input should be greater than or equal to 0.01"),
        ({"silence_s": 1.9}, "--silence-s: Input should be greater than or equal to 2"),  # workers report every second
        ({"decode_timeout_s": 1e20}, "--decode-timeout-s: Input should be less than or equal to 1000000000"),
        (
            {"target_device": "gpu"},
            "--target-device: expected auto, cpu, cuda, cuda:N or a list such as cuda:0,cuda:1, not",
        ),
        ({"target_device": "cuda:0,"}, "or a list such as cuda:0,cuda:1, not 'cuda:0,'"),
        ({"target_device": ","}, "--target-device: expected"),
        ({"target_device": "cuda,cuda:1"}, "--target-device: expected"),  # the first is ambiguous
        ({"target_device": "auto,cuda:1"}, "--target-device: expected"),
        ({"target_device": "cuda:0 cuda:1"}, "--target-device: expected"),
        ({"target_device": "cpu,cuda:0"}, "all layers must be on CUDA devices, or all on the CPU, not 'cpu,cuda:0'"),
        ({"draft_device": "cuda:0,cuda:1"}, "--draft-device: "),
        ({"draft_dtype": "int2"}, "--draft-dtype: "),
        ({"speculation": "fast"}, "--speculation: "),
        ({"preservation": "hipo"}, "--preservation: Input should be 'hippo', 'specvlm'"),
        ({"prune_ratio": 1.0}, "--prune-ratio: Input should be less than or equal to 0.99"),
        ({"prune_ratio": -0.1}, "--prune-ratio: "),
        ({"prune_ratio": "nan"}, "--prune-ratio: "),
        (
            {"compression": "dyckoe"},
            "--compression: Input should be 'none', 'v-cast', 'vidcom2', 'dycoke' or 'earlytom'",
        ),
        ({"compression_ratio": 1.5}, "--compression-ratio: "),
        ({"compression_ratio": 0.009}, "--compression-ratio: "),
        ({"dycoke_merge_ratio": 1}, "--dycoke-merge-ratio: "),
        ({"dycoke_hide_ratio": -1}, "--dycoke-hide-ratio: "),
        ({"dycoke_layer": 0}, "--dycoke-layer: "),
        ({"model": ""}, "--model: "),
        ({"root_path": "video"}, "--root-path: "),
        ({"served_model_name": 5}, "--served-model-name: "),  # a number in Ray Serve's `args`
        ({"otlp_traces_endpoint": "collector:4317"}, "--otlp-traces-endpoint: expected an address such as http://"),
        (
            {"otlp_traces_endpoint": "http://collector:43180000"},
            "--otlp-traces-endpoint: Port out of range 0-65535, not",
        ),
        ({"default_num_frames": 9, "max_frames": 8}, "default_num_frames 9 > max_frames 8"),
        ({"max_context": 2048, "kv_cache_tokens": 1024}, "max_context 2048 > kv_cache_tokens 1024"),
    ],
)
def test_a_value_out_of_bounds_is_an_error_that_names_its_source(flags: dict[str, object], message: str) -> None:
    assert message in refusal(flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"port": 0, "prune_ratio": 0, "compression_ratio": 0.01, "dycoke_hide_ratio": 0, "keep_alive_s": 0.01},
        {"port": 65535, "prune_ratio": 0.99, "compression_ratio": 1, "gpu_memory_utilization": 1, "silence_s": 1e9},
        {"max_queued_requests": 0, "max_stored_bytes": 0, "max_cached_frame_bytes": 0, "decode_workers": 1},
        {"max_running_requests": 1, "max_upload_bytes": 10**15, "decode_workers": 4096, "dycoke_layer": 1},
        {"default_num_frames": 8, "max_frames": 8, "max_context": 1024, "kv_cache_tokens": 1024},
    ],
)
def test_a_value_at_its_bound_is_taken(flags: dict[str, float]) -> None:
    settings = load_settings(Settings, flags)
    assert {name: getattr(settings, name) for name in flags} == flags


def test_a_wrong_variable_is_named_as_the_variable_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIDSPEC_PORT", "tcp://10.0.0.1:8000")
    told = refusal({})
    assert told.startswith("VIDSPEC_PORT: ")
    assert "enableServiceLinks" in told
    monkeypatch.setenv("VIDSPEC_PORT", "http")
    assert "enableServiceLinks" not in refusal({})


def test_the_decoders_defaults_are_its_own() -> None:
    assert decoding_limits(Settings(), 8) == DecodingLimits()


def test_every_decoding_limit_can_be_set() -> None:
    settings = Settings(
        max_upload_bytes=1,
        max_duration_s=2,
        max_pixels=3,
        max_source_frames=4,
        max_frames=5,
        max_decoded_bytes=6,
        decode_timeout_s=7,
        max_frame_pixels=8,
    )
    assert decoding_limits(settings, 8) == DecodingLimits(
        max_bytes=1, max_duration_s=2, max_pixels=3, max_source_frames=4, max_frames=5, max_decoded_bytes=6,
        timeout_s=7, max_frame_pixels=8,
    )  # fmt: skip


def test_a_request_that_does_not_say_gets_the_operators_number_of_frames_or_the_models() -> None:
    assert decoding_limits(Settings(), 32).default_num_frames == 32
    assert decoding_limits(Settings(default_num_frames=5), 32).default_num_frames == 5


def test_both_workers_get_what_was_set_for_them() -> None:
    settings = Settings(
        model="a/target", revision="r1", target_device="cuda:1", target_dtype="bfloat16", target_threads=2,
        draft_model="a/draft", draft_revision="r2", draft_device="cuda:0", draft_dtype="float16", draft_threads=1,
        max_running_requests=3,
    )  # fmt: skip
    config = engine_config(settings)
    assert config.target == WorkerConfig(model="a/target", revision="r1", device="cuda:1", dtype="bfloat16", threads=2)
    assert config.draft == WorkerConfig(model="a/draft", revision="r2", device="cuda:0", dtype="float16", threads=1)
    assert config.max_running_requests == 3


@pytest.mark.parametrize(
    ("given", "taken"),
    [("cuda:0,cuda:1", "cuda:0,cuda:1"), ("cuda:2, cuda:0", "cuda:2,cuda:0"), ("cpu,cpu", "cpu,cpu")],
)
def test_a_target_may_have_several_devices(monkeypatch: pytest.MonkeyPatch, given: str, taken: str) -> None:
    monkeypatch.setenv("VIDSPEC_TARGET_DEVICE", given)
    assert engine_config(load_settings(Settings, {})).target.device == taken


def test_a_target_may_draft_for_itself_in_four_bits() -> None:
    config = engine_config(Settings(model="a/model", revision="r1", draft_model="self"))
    assert config.draft == replace(config.target, dtype="int4")
    asked = engine_config(Settings(draft_model="self", draft_dtype="float32", draft_threads=2))
    assert asked.draft is not None
    assert (asked.draft.dtype, asked.draft.threads) == ("float32", 2)
    assert Path(model_path(ModelSpec(path=asked.draft.model, role="draft"))) == BUNDLED_TARGET


def test_without_speculation_there_is_no_draft() -> None:
    assert engine_config(Settings(speculation=SpeculationMode.OFF)).draft is None


def test_the_bundled_target_has_its_draft_and_a_model_of_ones_own_only_one_that_is_named() -> None:
    bundled = engine_config(Settings())
    assert bundled.draft is not None
    assert bundled.draft.model == bundled.target.model
    assert engine_config(Settings(model="a/target")).draft is None
