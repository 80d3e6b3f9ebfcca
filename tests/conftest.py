"""Models for the tests that need a real one: fetched and built once, then found in the cache."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from shared.models.cache import ModelCache
from shared.models.pull import fetch_gguf, pull

# The same examples in every run, no clock, nothing written beside the sources.
settings.register_profile(
    "souschef", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("souschef")

NOT_INSTALLABLE = "this kernel"
"""How the reason of a skip begins that no package can mend; any other is a failure in continuous integration."""

_SMOLLM2 = "smollm2-135m-instruct"
_QWEN_05 = "qwen2.5-coder-0.5b-instruct"


def _gguf(name: str) -> Path:
    """The file in $SOUSCHEF_TEST_GGUF_DIR if it is there, else in the cache."""
    given = Path(os.environ.get("SOUSCHEF_TEST_GGUF_DIR", "")) / f"{name}.gguf"
    return given if given.is_file() else fetch_gguf(name, ModelCache())


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    return _gguf(_SMOLLM2)


@pytest.fixture(scope="session")
def smollm2_directory() -> Path:
    return pull(_SMOLLM2, ModelCache())


@pytest.fixture(scope="session")
def qwen05_gguf() -> Path:
    """Half a gigabyte: for tests marked `model`."""
    return _gguf(_QWEN_05)


@pytest.fixture(scope="session")
def qwen05_directory() -> Path:
    """Minutes to build the first time: for tests marked `model`."""
    return pull(_QWEN_05, ModelCache())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With CI=true a test may not be skipped for a component that could have been installed."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(NOT_INSTALLABLE):
            report.outcome = "failed"
            report.longrepr = f"skipped in continuous integration: {reason}"
    return report
