"""The capacity simulation: against the closed form of a queue, against itself, and against a real service."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from typer.testing import CliRunner

from cloud_service.capacity.measure import measure_costs
from cloud_service.capacity.plan import Costs, Edges, Limits
from cloud_service.capacity.search import Target, hint_turns, most_edges
from cloud_service.capacity.simulation import Outcome, percentile, simulate
from cloud_service.cli import app
from cloud_service.pass_costs import interpolated
from shared.errors import ConfigError
from tests.cloud_toy import TableDecoder

FLAT = Costs([10.0] * 9, prefill_ms=0.0)
CPU = Costs([84.0, 106.0, 137.0, 160.0, 177.0, 200.0, 220.0, 245.0, 260.0], [84.0, 110.0, 130.0, 150.0], 5.0)
UNLIMITED = Limits(max_running=1, max_waiting=10**6, num_slots=2)
NEAR = Edges(4, gamma=4, pause_s=0.0, prompt_tokens=1.0, answer_tokens=64.0, rtt_ms=0.0, draft_ms=0.0)


def run(
    costs: Costs = CPU, limits: Limits | None = None, seconds: float = 200.0, seed: int = 0, **edges: Any
) -> Outcome:
    return simulate(costs, limits or Limits(), dataclasses.replace(NEAR, **edges), seconds, seed)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_many_rare_single_rounds_wait_as_a_queue_of_fixed_service_does(load: float) -> None:
    """M/D/1: the mean time in the system is D (1 + load / (2 (1 - load)))."""
    service_s, num_edges = 0.010, 200
    edges = dataclasses.replace(NEAR, number=num_edges, answer_tokens=1.0, pause_s=num_edges * service_s / load)
    outcome = simulate(FLAT, UNLIMITED, edges, seconds=600.0)
    assert outcome.busy == pytest.approx(load, rel=0.05)
    expected_s = service_s * (1 + load / (2 * (1 - load)))
    assert outcome.answer_mean_s == pytest.approx(expected_s, rel=0.1)


@pytest.mark.parametrize("gamma", [0, 3, None])
@pytest.mark.parametrize("number", [1, 40, 400])
def test_every_answer_ends_is_handed_back_or_goes_on(gamma: int | None, number: int) -> None:
    outcome = run(number=number, gamma=gamma, pause_s=5.0, prompt_tokens=100.0, rtt_ms=40.0)
    assert outcome.started == outcome.finished + outcome.handed_back + outcome.unfinished
    assert 0 <= outcome.unfinished <= number
    assert 0 <= outcome.busy <= 1.01  # A pass counts whole in the time in which it begins.


def test_the_same_seed_gives_the_same_numbers() -> None:
    assert run(gamma=None, pause_s=1.0) == run(gamma=None, pause_s=1.0)
    assert run(gamma=None, pause_s=1.0, seed=1) != run(gamma=None, pause_s=1.0)


def test_one_edge_alone_gets_the_formula() -> None:
    """E(alpha, gamma) tokens for c(gamma + 1) + gamma c_draft + RTT; without drafts a token for c(1)."""
    drafts = run(
        number=1, acceptance=0.8, answer_tokens=1e6, draft_ms=5.0, rtt_ms=30.0, rtt_p95_ms=30.0, seconds=2000.0
    )
    expected = sum(0.8**power for power in range(5)) / (0.177 + 4 * 0.005 + 0.030)
    assert drafts.tokens_per_second == pytest.approx(expected, rel=0.03)
    assert run(number=1, gamma=0, answer_tokens=1e6).tokens_per_second == pytest.approx(1 / 0.084, rel=0.01)


def test_streams_share_a_pass() -> None:
    together = run(number=4, gamma=0, answer_tokens=1e6)
    assert together.mean_batch > 3.8
    assert together.tokens_per_second == pytest.approx(4 / 0.150, rel=0.02)


def test_more_edges_wait_longer_and_more_replicas_less() -> None:
    shape: dict[str, Any] = {"pause_s": 20.0, "rtt_ms": 40.0, "prompt_tokens": 50.0, "seconds": 600.0}
    waits = [run(number=number, **shape).token_p95_ms for number in (2, 10, 40)]
    assert waits == sorted(waits)
    eased = [run(number=40, limits=Limits(replicas=replicas), **shape).token_p95_ms for replicas in (1, 2, 8)]
    assert eased == sorted(eased, reverse=True)


def test_too_few_slots_read_prompts_again_and_again() -> None:
    shape: dict[str, Any] = {"number": 16, "gamma": 2, "prompt_tokens": 400.0, "answer_tokens": 32.0}
    plenty, few = (run(limits=Limits(num_slots=slots), **shape) for slots in (64, 4))
    assert few.tokens_per_second < 0.5 * plenty.tokens_per_second


def test_a_full_queue_hands_answers_back() -> None:
    limits = Limits(max_running=2, max_waiting=1)
    assert run(number=30, limits=limits).handed_back > 0
    assert run(number=2, limits=limits).handed_back == 0


def test_the_search_ends_at_the_last_number_that_is_good_enough() -> None:
    target = Target(token_ms=3 * 84.0)
    edges = dataclasses.replace(NEAR, pause_s=30.0, prompt_tokens=50.0)
    found = most_edges(CPU, Limits(), edges, target, seconds=400.0)
    assert found.edges > 0
    assert target.met_by(found)
    beyond = dataclasses.replace(edges, number=2 * found.edges)
    assert not target.met_by(simulate(CPU, Limits(), beyond, 400.0))
    assert most_edges(CPU, Limits(), edges, Target(token_ms=1.0), seconds=100.0).edges == 0
    more = most_edges(CPU, Limits(replicas=4), edges, target, seconds=400.0)
    assert more.edges > 2 * found.edges


def test_the_rule_turns_where_the_simulation_does() -> None:
    """Drafts for a few sessions, one batch of streams for many; as drafts share passes too, long ones last longer."""
    edges = dataclasses.replace(NEAR, acceptance=0.8, rtt_ms=20.0, rtt_p95_ms=20.0, draft_ms=5.0)
    rising = [84.0 + 24.0 * more for more in range(8)]
    turns = {turn.sessions: turn for turn in hint_turns(Costs(rising), Limits(), edges, (2, 3, 4, 8), seconds=200.0)}
    assert turns[2].best > 0
    assert turns[8].best == turns[8].rule == 0
    assert max(turn.lost_by_rule for turn in turns.values()) < 0.05


def test_rounds_share_a_pass_where_that_costs_less() -> None:
    """A pass costs the same for all rows, or so much that one by one is better."""
    shape: dict[str, Any] = {"number": 4, "gamma": 1, "acceptance": 1.0, "answer_tokens": 1e6}
    shared = run(Costs([10.0, 11.0], [10.0, 11.0, 11.0, 11.0, 11.0, 11.0, 11.0, 11.0]), **shape)
    assert shared.mean_batch > 1.9  # Those that come while a pass runs wait for the next.
    apart = run(Costs([10.0, 11.0], [10.0, 100.0]), **shape)
    assert apart.mean_batch == 1.0
    assert apart.tokens_per_second == pytest.approx(2 / 0.011, rel=0.02)
    assert shared.tokens_per_second > 1.9 * apart.tokens_per_second


def test_percentiles_and_interpolation() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0], 0.95) == 1.0
    assert math.isnan(percentile([], 0.5))
    assert interpolated({1: 10.0, 2: 12.0, 4: 20.0}) == [10.0, 12.0, 16.0, 20.0]


def test_costs_are_measured_in_milliseconds_of_the_clock() -> None:
    ticks = iter(range(10_000))
    costs = measure_costs(TableDecoder(), lambda: next(ticks) / 1e3)
    assert costs.verify_ms == [1.0] * 9
    assert costs.batch_ms == [pytest.approx(1.0)] * 32
    assert costs.prefill_ms == pytest.approx(1 / 32)


def test_the_command_prints_a_simulation_and_json(tmp_path: Any) -> None:
    curve = tmp_path / "handshake.json"
    curve.write_text(json.dumps({"model": "m", "verify_cost_ms": [100, 110, 120, 130, 140]}))
    short = ["capacity", "--curve", str(curve), "--seconds", "20", "--replicas", "1", "--prefill-ms", "5"]
    printed = CliRunner().invoke(app, short).output
    assert "simulated: the most edges" in printed
    assert "where the hint should turn" in printed
    assert "A simulation" in printed
    content = json.loads(CliRunner().invoke(app, [*short, "--json"]).output)
    assert content["note"].startswith("A simulation")
    assert {row["kind"] for row in content["capacity"]} == {"cloud generates", "drafts of 4", "drafts by hint"}
    assert content["costs"]["verify_ms"] == [100, 110, 120, 130, 140]


def test_a_curve_that_is_none_is_refused() -> None:
    result = CliRunner().invoke(app, ["capacity", "--curve", "10,-1"])
    assert isinstance(result.exception, ConfigError)
    assert "--curve" in str(result.exception)
