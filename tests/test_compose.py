"""The compose file, its settings and its images as they are written. tests/test_containers.py runs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_settings import BaseSettings

from cloud_service.config import CloudSettings
from edge_agent.config import EdgeSettings
from shared.server import LAST_BYTES_S

ROOT = Path(__file__).parent.parent
KEYS = (
    "EDGE_API_KEYS",
    "EDGE_ADMIN_KEY",
    "CLOUD_API_KEY",
    "METRICS_KEY",
    "REDIS_PASSWORD",
    "STORE_KEY",
    "GRAFANA_ADMIN_PASSWORD",
)
PROFILES = {
    "full": {"edge", "cloud", "redis", "prometheus", "grafana"},
    "edge-only": {"edge-alone", "prometheus", "grafana"},
    "scale": {"edge", "cloud-replica", "gateway", "redis", "prometheus", "grafana"},
}
UNITS = {"s": 1, "m": 60}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


def example() -> dict[str, str]:
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def variables(text: str) -> Iterator[tuple[str, str]]:
    yield from re.findall(r"\$\{([A-Z_]+)(:?[-?])", text)


def seconds(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]]


def test_each_profile_has_its_services(services: dict[str, dict[str, Any]]) -> None:
    for profile, expected in PROFILES.items():
        assert {name for name, service in services.items() if profile in service["profiles"]} == expected


def test_a_service_starts_after_services_of_its_profiles_and_waits_for_none(
    services: dict[str, dict[str, Any]],
) -> None:
    for name, service in services.items():
        started_first = service.get("depends_on", [])
        assert isinstance(started_first, list), name
        for other in started_first:
            assert set(service["profiles"]) <= set(services[other]["profiles"]), name


def test_health_is_asked_for_rarely_and_soon_after_a_start(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert seconds(service["healthcheck"]["interval"]) >= 30, name
        assert service["healthcheck"]["start_period"], name


def test_every_service_is_confined(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service["user"].startswith("0"), name
        assert "privileged" not in service, name
        assert service["mem_limit"], name
        assert service["cpus"], name
        assert service["pids_limit"], name
        assert service["healthcheck"]["test"], name
        assert service["restart"] == "unless-stopped", name


def test_only_edge_and_grafana_are_published_and_on_loopback_at_first(services: dict[str, dict[str, Any]]) -> None:
    published = {name for name, service in services.items() if "ports" in service}

    assert published == {"edge", "edge-alone", "grafana"}
    for name in published:
        assert [port.split(":-")[1].split("}")[0] for port in services[name]["ports"]] == ["127.0.0.1"]


def test_what_nobody_needs_to_reach_has_no_way_out(compose: dict[str, Any]) -> None:
    assert compose["networks"]["inside"] == {"internal": True}
    for name in ("redis", "prometheus", "gateway"):
        assert set(compose["services"][name]["networks"]) == {"inside"}


def test_models_are_one_volume_of_edge_and_cloud(compose: dict[str, Any]) -> None:
    assert "models" in compose["volumes"]
    for name in ("edge", "edge-alone", "cloud", "cloud-replica"):
        assert compose["services"][name]["volumes"] == ["models:/models"]


def test_the_stop_grace_is_longer_than_the_services_own(services: dict[str, dict[str, Any]]) -> None:
    for name in ("edge", "edge-alone", "cloud", "cloud-replica"):
        own = float(services[name]["environment"]["SOUSCHEF_GRACE_S"]) + LAST_BYTES_S
        assert seconds(services[name]["stop_grace_period"]) > own
    assert seconds(services["gateway"]["stop_grace_period"]) > seconds(services["cloud-replica"]["stop_grace_period"])


def test_the_services_variables_are_settings(services: dict[str, dict[str, Any]]) -> None:
    known: dict[str, type[BaseSettings]] = {
        "edge": EdgeSettings,
        "edge-alone": EdgeSettings,
        "cloud": CloudSettings,
        "cloud-replica": CloudSettings,
    }
    for name, model in known.items():
        for variable in services[name]["environment"]:
            assert variable.removeprefix("SOUSCHEF_").lower() in model.model_fields, variable


def test_keys_have_no_default_and_everything_else_has_one() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    found = set(variables(text))

    assert {name for name, mark in found if mark == ":?"} == set(KEYS)
    assert not {name for name, mark in found if mark != ":?"} & set(KEYS)
    assert not re.search(r"\$\{[A-Z_]+\}", text)


def test_the_example_names_every_setting_and_holds_no_key() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    settings = example()
    named = {name for name, _ in variables(text) if not name.startswith("BUILD_") and not name.endswith("_IMAGE")}

    assert named <= set(settings)
    assert set(settings) - named == {"COMPOSE_PROFILES"}
    assert [settings[key] for key in KEYS] == [""] * len(KEYS)


def test_make_env_fills_each_key_with_another_one_and_keeps_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / ".env.example").write_bytes((ROOT / ".env.example").read_bytes())
    script = tmp_path / "deploy/make-env.sh"
    script.write_bytes((ROOT / "deploy/make-env.sh").read_bytes())

    subprocess.run(["sh", script], check=True, capture_output=True)
    made = tmp_path / ".env"
    first = made.read_text(encoding="utf-8")
    again = subprocess.run(["sh", script], capture_output=True)

    settings = dict(line.split("=", 1) for line in first.splitlines() if line and not line.startswith("#"))
    keys = [settings[key] for key in KEYS]
    assert all(re.fullmatch(r"[0-9a-f]{48}", key) for key in keys)
    assert len(set(keys)) == len(keys)
    assert {name: value for name, value in settings.items() if name not in KEYS} == {
        name: value for name, value in example().items() if name not in KEYS
    }
    assert made.stat().st_mode & 0o077 == 0
    assert again.returncode == 1
    assert made.read_text(encoding="utf-8") == first


@pytest.fixture(scope="module")
def compose_program() -> None:
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed")


def config(directory: Path, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """docker-compose's own reading of the file. No engine is needed."""
    shutil.copytree(ROOT / "deploy", directory / "deploy")
    (directory / "docker-compose.yml").write_bytes((ROOT / "docker-compose.yml").read_bytes())
    (directory / ".env").write_text("".join(f"{name}={value}\n" for name, value in settings.items()), encoding="utf-8")
    return subprocess.run(
        ["docker-compose", "config"],
        cwd=directory,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.usefixtures("compose_program")
@pytest.mark.parametrize("profile", PROFILES)
def test_compose_accepts_the_file(profile: str, tmp_path: Path) -> None:
    result = config(tmp_path, {**example(), **dict.fromkeys(KEYS, "k"), "COMPOSE_PROFILES": profile})

    assert result.returncode == 0, result.stderr
    read = yaml.safe_load(result.stdout)["services"]
    assert PROFILES[profile] <= set(read)


@pytest.mark.usefixtures("compose_program")
@pytest.mark.parametrize("key", KEYS)
def test_the_stack_refuses_an_empty_key_by_name(key: str, tmp_path: Path) -> None:
    result = config(tmp_path, {**example(), **dict.fromkeys(KEYS, "k"), key: "", "EDGE_ADDRESS": "0.0.0.0"})

    assert result.returncode != 0
    assert f"{key} must be set in .env" in result.stderr


def dockerfiles() -> list[Path]:
    return sorted((ROOT / "deploy").rglob("*Dockerfile"))


@pytest.mark.parametrize("path", dockerfiles(), ids=lambda path: str(path.relative_to(ROOT / "deploy")))
def test_images_take_their_base_as_an_argument_and_no_architecture(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)

    assert re.match(r"(#.*\n)*ARG [A-Z]+_IMAGE=\S+:v?[0-9]\S*\n", text)
    assert bases[0].startswith("${")
    assert not re.search(r"amd64|x86_64|arm64|aarch64|latest", text)


def test_defaults_of_images_are_the_same_in_both_places() -> None:
    compose = dict(
        re.findall(r"\$\{([A-Z]+_IMAGE):-([^}]+)\}", (ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    )
    given = dict(pair for path in dockerfiles() for pair in re.findall(r"ARG ([A-Z]+_IMAGE)=(\S+)", path.read_text()))

    assert compose == given


def test_the_image_holds_only_what_the_services_need() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "deploy/souschef.Dockerfile").read_text(), re.MULTILINE)

    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == {name for names in copied for name in names.split()}
