"""API keys as settings: from both sources, checked, and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from vidspec_service.errors import ConfigError
from vidspec_service.settings import SECRETS, Settings, api_keys, client_api_key, load_settings

ONE, TWO, THREE = (f"{word}-0123456789abcdef" for word in ("one", "two", "three"))


def test_without_a_source_nobody_is_asked_for_a_key() -> None:
    assert api_keys(Settings()) == frozenset()


@pytest.mark.parametrize("value", ["", "  "])
@pytest.mark.parametrize("name", ["VIDSPEC_API_KEYS", "VIDSPEC_API_KEY_FILE"])
def test_an_empty_variable_does_not_open_the_server(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name} is empty"):
        load_settings(Settings, {})


@pytest.mark.parametrize("name", ["api_keys", "api_key_file"])
@pytest.mark.parametrize("value", ["", "null", "''"])
def test_an_empty_key_of_the_file_does_not_open_the_server(tmp_path: Path, name: str, value: str) -> None:
    config = tmp_path / "vidspec.yaml"
    config.write_text(f"{name}: {value}\n")
    with pytest.raises(ConfigError, match=r"is empty|has no API key|expected a path"):
        api_keys(load_settings(Settings, {}, config))


def test_a_client_of_the_same_settings_takes_one_of_the_keys() -> None:
    assert client_api_key(Settings()) is None
    assert client_api_key(Settings(api_keys=SecretStr(f"{ONE} {TWO}"))) in {ONE, TWO}


def test_both_sources_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# for the web page\n{ONE}\r\n\n  {TWO}\n")
    config = tmp_path / "vidspec.yaml"
    config.write_text(f"api_key_file: {file}\n")
    monkeypatch.setenv("VIDSPEC_API_KEYS", f"{THREE}, {ONE}")
    assert api_keys(load_settings(Settings, {}, config)) == {ONE, TWO, THREE}


def test_a_file_may_begin_with_the_byte_order_mark_of_windows_editors(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{ONE}\r\n{TWO}\r\n", encoding="utf-8-sig")
    assert api_keys(Settings(api_key_file=file)) == {ONE, TWO}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        (b"", "has no API key"),
        (b"# nothing\n\n", "has no API key"),
        (b"short-key\n", "16 to 256 printable ASCII characters"),
        (b"sixteen characters with spaces\n", "no spaces"),
        ("schlüssel-0123456789\n".encode(), "printable ASCII"),
        (b"x" * 257, "16 to 256"),
        (b"\xff\xfe", "it is not UTF-8 text"),
    ],
)
def test_a_bad_file_is_an_error_that_repeats_none_of_it(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        api_keys(Settings(api_key_file=file))
    assert str(file) in caught.value.message
    assert not content or content.decode(errors="replace").strip() not in caught.value.message.replace("16", "")


@pytest.mark.parametrize("given", [",", " , ", "short", f"{ONE},short"])
def test_a_bad_variable_is_an_error_that_repeats_none_of_it(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("VIDSPEC_API_KEYS", given)
    with pytest.raises(ConfigError, match="VIDSPEC_API_KEYS") as caught:
        api_keys(load_settings(Settings, {}))
    assert "short" not in caught.value.message


def test_bad_keys_of_the_config_file_are_told_by_the_name_that_they_have_there(tmp_path: Path) -> None:
    config = tmp_path / "vidspec.yaml"
    config.write_text("api_keys: short\n")
    with pytest.raises(ConfigError, match=r"^api_keys .*: an API key must have 16"):
        api_keys(load_settings(Settings, {}, config))


def test_a_secret_of_the_wrong_type_is_not_repeated_either(tmp_path: Path) -> None:
    config = tmp_path / "vidspec.yaml"
    config.write_text(f"api_keys: [{ONE}, {TWO}]\n")
    with pytest.raises(ConfigError, match="api_keys in ") as caught:
        load_settings(Settings, {}, config)
    assert ONE not in caught.value.message


def test_secrets_are_not_shown_with_the_other_settings() -> None:
    assert sorted(SECRETS) == ["api_keys"]
    assert ONE not in repr(Settings(api_keys=ONE))  # type: ignore[arg-type]  # a string, as from every source


@pytest.mark.parametrize(
    ("given", "meant"), [("a.example", ("a.example",)), ("a.example, b.example:8443", ("a.example", "b.example:8443"))]
)
def test_lists_are_written_with_commas(monkeypatch: pytest.MonkeyPatch, given: str, meant: tuple[str, ...]) -> None:
    monkeypatch.setenv("VIDSPEC_VIDEO_URL_HOSTS", given)
    assert load_settings(Settings, {"served_model_name": given}).video_url_hosts == meant
    assert load_settings(Settings, {"served_model_name": given}).served_model_name == meant
    assert load_settings(Settings, {"cors_origins": "*, https://a.example:8443"}).cors_origins == (
        "*",
        "https://a.example:8443",
    )
    assert load_settings(Settings, {}).served_model_name is None


@pytest.mark.parametrize(
    "given", ["https://x.example/y", "x.example/y", "*.example", "x.example:", "user@x.example", "bücher.example"]
)
def test_a_host_that_could_never_be_fetched_from_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="expected hosts such as"):
        load_settings(Settings, {"video_url_hosts": given})


@pytest.mark.parametrize(
    "given",
    [
        "https://app.example/", "app.example", "https://App.example", "https://a.example/x", "https://*.example",
        "https://a.example:443", "http://a.example:80",
    ],
)  # fmt: skip
def test_an_origin_that_no_browser_sends_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="expected origins such as"):
        load_settings(Settings, {"cors_origins": f"https://b.example,{given}"})


def test_origins_are_those_of_browsers_and_their_extensions() -> None:
    given = ("https://a.example", "http://b.example:443", "http://localhost:3000", "chrome-extension://a", "null", "*")
    assert load_settings(Settings, {"cors_origins": ",".join(given)}).cors_origins == given
