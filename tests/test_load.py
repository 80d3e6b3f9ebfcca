"""Two hundred clients on a queue of 32, briefly; `make load` does it for two minutes and looks at the clock too."""

from __future__ import annotations

import pytest

from tests.load import run_load


@pytest.mark.slow
def test_two_hundred_clients_on_a_queue_of_32() -> None:
    report = run_load(20.0)
    assert set(report.statuses) <= {200, 429, 503}
    assert report.codes <= {"overloaded", "rate_limit_exceeded"}
    assert report.statuses[200] > 20
    assert report.statuses[503] + report.statuses[429] > 0
    assert report.num_wrong == 0
    assert report.left_running == 0
    assert report.growth < 32 * 2**20
    assert len(report.health_s) > 5
