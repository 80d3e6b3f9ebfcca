"""Settings: which source wins, and that every mistake stops the start with one clear line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_agent.config import Preset, is_loopback, load_settings
from shared.errors import ConfigError


@pytest.fixture(autouse=True)
def _clean_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No souschef.toml and no variable of the developer's own."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SOUSCHEF_")]:
        monkeypatch.delenv(name)


def complaint(**flags: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_are_the_small_preset_on_loopback() -> None:
    settings = load_settings()
    assert (settings.host, settings.port, settings.preset) == ("127.0.0.1", 8080, Preset.SMALL)
    assert settings.target == "qwen2.5-coder-0.5b-instruct"
    assert not settings.has_draft


@pytest.mark.parametrize(
    ("preset", "target", "draft"),
    [
        ("tiny", "smollm2-135m-instruct", "none"),
        ("small", "qwen2.5-coder-0.5b-instruct", "none"),
        ("laptop", "qwen2.5-coder-1.5b-instruct", "none"),
    ],
)
def test_preset_fills_what_is_not_given(preset: str, target: str, draft: str) -> None:
    settings = load_settings({"preset": preset})
    assert (settings.target, settings.draft) == (target, draft)
    assert load_settings({"preset": preset, "draft": "none"}).draft == "none"
    assert load_settings({"preset": preset, "target": "file:x.gguf"}).target == "file:x.gguf"


def test_flags_over_environment_over_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("souschef.toml").write_text('port = 1111\nmax_running = 2\ncontext_length = 512\npreset = "tiny"\n')
    monkeypatch.setenv("SOUSCHEF_PORT", "2222")
    monkeypatch.setenv("SOUSCHEF_MAX_RUNNING", "3")
    settings = load_settings({"port": 3333, "threads": None, "api_keys": ()})
    assert (settings.port, settings.max_running, settings.context_length) == (3333, 3, 512)
    assert settings.target == "smollm2-135m-instruct"


def test_named_file_replaces_the_default_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("souschef.toml").write_text("port = 1111\n")
    other = tmp_path / "other.toml"
    other.write_text("port = 2222\n")
    assert load_settings({"config": other}).port == 2222
    monkeypatch.setenv("SOUSCHEF_CONFIG", str(other))
    assert load_settings().port == 2222


def test_lists_come_from_file_and_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("souschef.toml").write_text('api_keys = ["a", "b"]\n')
    monkeypatch.setenv("SOUSCHEF_CORS_ORIGINS", "https://a.example, https://b.example")
    settings = load_settings()
    assert [key.get_secret_value() for key in settings.api_keys] == ["a", "b"]
    assert settings.cors_origins == ("https://a.example", "https://b.example")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"port": 70000}, ["port", "65535"]),
        ({"port": "many"}, ["port", "integer"]),
        ({"preset": "huge"}, ["preset", "'tiny', 'small' or 'laptop'"]),
        ({"max_running": 0}, ["max_running", "1"]),
        ({"ping_s": float("nan")}, ["ping_s"]),
        ({"max_gamma": 17}, ["max_gamma", "16"]),
        ({"prot": 1}, ["prot is no setting", "did you mean port"]),
        ({"cors_origins": ("*",)}, ["cors_origins", "https://app.example"]),
        ({"api_keys": (" ",)}, ["api_keys", "empty"]),
        ({"admin_key": ""}, ["admin_key", "empty"]),
        ({"host": "0.0.0.0"}, ["0.0.0.0", "API key"]),
        ({"host": "example.com"}, ["example.com", "API key"]),
        ({"config": "nowhere.toml"}, ["nowhere.toml", "No such file"]),
    ],
)
def test_bad_value_stops_the_start_and_says_what_is_allowed(flags: dict[str, object], words: list[str]) -> None:
    message = complaint(**flags)
    for word in words:
        assert word in message


def test_unknown_variable_is_named_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOUSCHEF_MAX_RUNING", "3")
    assert "did you mean SOUSCHEF_MAX_RUNNING?" in complaint()


def test_unknown_line_of_the_file_is_named() -> None:
    Path("souschef.toml").write_text("pory = 1\n")
    assert "pory is no setting; did you mean port?" in complaint()


def test_broken_file_is_named() -> None:
    Path("souschef.toml").write_text("port = = 1\n")
    assert "souschef.toml is not valid TOML" in complaint()


def test_keys_show_neither_in_complaints_nor_in_representations() -> None:
    assert "canary" not in complaint(api_keys=("canary",), port=-1)
    assert "canary" not in complaint(admin_key=["canary"])
    assert "canary" not in repr(load_settings({"api_keys": ("canary",), "admin_key": "canary"}))


def test_any_address_is_allowed_with_a_key() -> None:
    assert load_settings({"host": "0.0.0.0", "api_keys": ("k",)}).host == "0.0.0.0"


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "")),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_empty_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "API_KEYS", "ADMIN_KEY", "CLOUD_URL"):
        monkeypatch.setenv(f"SOUSCHEF_{name}", "")
    settings = load_settings()
    assert (settings.port, settings.api_keys, settings.admin_key, settings.cloud_url) == (8080, (), None, None)
