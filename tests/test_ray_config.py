"""The Ray Serve configuration, its Kubernetes resource and its Prometheus job as they are written."""

from __future__ import annotations

import copy
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cloud_service.config import CloudSettings, load_settings
from deploy.ray.metrics import ReplicaMetrics, Replicas
from shared.protocol import SESSION_HEADER

ROOT = Path(__file__).parent.parent
DIRECTORY = ROOT / "deploy/ray"


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DIRECTORY / name).read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return read("serve.yaml")


@pytest.fixture(scope="module")
def resource() -> dict[str, Any]:
    return read("rayservice.yaml")


def test_the_arguments_are_settings_and_both_hosts_agree(config: dict[str, Any]) -> None:
    [application] = config["applications"]
    settings = load_settings(application["args"])

    assert set(application["args"]) <= set(CloudSettings.model_fields)
    assert settings.host == config["http_options"]["host"] == "127.0.0.1"
    assert settings.port == config["http_options"]["port"]


def test_the_router_hashes_the_header_that_edges_send(config: dict[str, Any]) -> None:
    variables = config["controller_options"]["runtime_env"]["env_vars"]

    assert variables["RAY_SERVE_SESSION_ID_HEADER_KEY"] == SESSION_HEADER


def test_serve_never_refuses_what_a_replica_would_admit(config: dict[str, Any]) -> None:
    """A request that Serve finds no room for would go to another replica, and its session with it."""
    [application] = config["applications"]
    [verifier] = application["deployments"]
    settings = load_settings(application["args"])

    assert verifier["max_ongoing_requests"] >= 2 * (settings.max_running + settings.max_waiting)
    assert verifier["autoscaling_config"]["target_ongoing_requests"] < settings.max_running
    assert verifier["graceful_shutdown_timeout_s"] >= settings.grace_s


def test_kubernetes_runs_the_same_beyond_loopback(config: dict[str, Any], resource: dict[str, Any]) -> None:
    expected = copy.deepcopy(config)
    expected["http_options"]["host"] = expected["applications"][0]["args"]["host"] = "0.0.0.0"

    assert yaml.safe_load(resource["spec"]["serveConfigV2"]) == expected


def test_the_resource_has_what_kuberay_asks_for(config: dict[str, Any], resource: dict[str, Any]) -> None:
    assert (resource["apiVersion"], resource["kind"]) == ("ray.io/v1", "RayService")
    cluster = resource["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    [group] = cluster["workerGroupSpecs"]
    [verifier] = config["applications"][0]["deployments"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    pods = [one["template"]["spec"] for one in (cluster["headGroupSpec"], group)]
    for pod in pods:
        [container] = pod["containers"]
        variables = {one["name"]: one for one in container["env"]}
        assert variables["RAY_USAGE_STATS_ENABLED"]["value"] == "0"
        # Keys come from a secret, never from this file.
        assert all(
            "secretKeyRef" in one["valueFrom"] for name, one in variables.items() if name.startswith("SOUSCHEF_")
        )
        assert "SOUSCHEF_API_KEYS" in variables
        assert config["http_options"]["port"] in [port["containerPort"] for port in container["ports"]]
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    assert pods[1]["containers"][0]["resources"]["limits"]["cpu"] == str(verifier["ray_actor_options"]["num_cpus"])
    assert pods[1]["terminationGracePeriodSeconds"] > verifier["graceful_shutdown_timeout_s"]
    assert {mount["name"] for mount in pods[1]["containers"][0]["volumeMounts"]} == {
        volume["name"] for volume in pods[1]["volumes"]
    }


def test_the_resource_names_the_locked_version(resource: dict[str, Any]) -> None:
    lock = (ROOT / "requirements/ray.txt").read_text(encoding="utf-8")
    locked = re.search(r"^ray==(\S+)", lock, re.MULTILINE)

    assert locked is not None
    assert resource["spec"]["rayClusterConfig"]["rayVersion"] == locked[1]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (make setup-ray)")
def test_serve_takes_the_configuration() -> None:
    script = f"""
import yaml
from ray.serve.schema import ServeDeploySchema
config = yaml.safe_load(open({str(DIRECTORY / "serve.yaml")!r}))
[application] = ServeDeploySchema.model_validate(config).applications
assert [one.name for one in application.deployments] == ["Verifier"]
from deploy.ray.app import Verifier, build
assert Verifier.__name__ == "Verifier"
build({{"preset": "tiny"}})
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_the_metrics_of_all_replicas_are_told_apart() -> None:
    def counting(number: int) -> ReplicaMetrics:
        registry = CollectorRegistry()
        Counter("rounds", "Rounds", ["outcome"], registry=registry).labels(outcome="ok").inc(number)
        Gauge("sessions", "Sessions", registry=registry).set(number)
        Histogram("wait_seconds", "Wait", buckets=(1, 2), registry=registry).observe(number)
        return ReplicaMetrics(f"replica-{number}", list(registry.collect()))

    text = generate_latest(Replicas([counting(2), counting(1)])).decode()

    samples = {
        (sample.name, sample.labels["instance"], sample.labels.get("outcome") or sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["rounds_total", "replica-1", "ok"] == 1
    assert samples["rounds_total", "replica-2", "ok"] == 2
    assert samples["sessions", "replica-2", None] == 2
    assert samples["wait_seconds_bucket", "replica-1", "1.0"] == 1
    assert samples["wait_seconds_bucket", "replica-2", "1.0"] == 0
    assert text.count("# TYPE rounds_total counter") == 1


def test_the_prometheus_job_is_valid(tmp_path: Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    text = (DIRECTORY / "prometheus.yml").read_text(encoding="utf-8")
    (tmp_path / "prometheus.yml").write_text(text.replace("/tmp/keys", str(tmp_path)), encoding="utf-8")
    (tmp_path / "cloud").write_text("k", encoding="utf-8")

    result = subprocess.run([program, "check", "config", tmp_path / "prometheus.yml"], capture_output=True, timeout=60)

    assert result.returncode == 0, result.stderr
    [job] = yaml.safe_load(text)["scrape_configs"]
    assert job["honor_labels"] is True
