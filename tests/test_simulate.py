"""The simulator: it agrees with the closed form, rises and falls, and its command's output keeps its shape."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from edge_agent.commands.simulate import simulate as simulate_command
from edge_agent.cost_model import CostCurve
from edge_agent.gamma_chooser import expected_tokens
from edge_agent.measured_input import read_curve, read_rates
from edge_agent.simulate import (
    Pair,
    SpeedupRow,
    Workload,
    acceptance,
    measured_workload,
    play_round,
    random_workload,
    simulate,
)
from shared.acceptance import Draft, judge
from shared.errors import ConfigError
from shared.sampling import AcceptanceRule, Distribution, Sampler, SamplingParams, draw

RULES = list(AcceptanceRule)
ROW_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "gamma": {"type": "integer", "minimum": 0, "maximum": 12},
            "alpha": {"type": "number", "minimum": 0, "maximum": 1},
            "speedup_simulated": {"type": "number", "exclusiveMinimum": 0},
            "ci95": {"type": "number", "minimum": 0},
            "speedup_closed_form": {"type": "number", "exclusiveMinimum": 0},
        },
        "required": ["gamma", "alpha", "speedup_simulated", "ci95", "speedup_closed_form"],
        "additionalProperties": False,
    },
}


def assert_agree(rows: list[SpeedupRow]) -> None:
    """Nearly all within the 95% interval, none past three standard errors."""
    misses = [row for row in rows if abs(row.speedup_simulated - row.speedup_closed_form) > row.ci95 + 1e-12]
    assert len(misses) <= 0.15 * len(rows) + 1, misses
    for row in rows:
        assert abs(row.speedup_simulated - row.speedup_closed_form) <= row.ci95 * 3 / 1.96 + 1e-12, row


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("distance", [0.5, 2.0])
def test_random_distributions_agree_with_the_closed_form(distance: float, rule: AcceptanceRule) -> None:
    rows = simulate(random_workload(distance, num_pairs=40), rule=rule, num_rounds=300, seed=4)
    assert [row.gamma for row in rows] == list(range(13))
    assert_agree(rows)


@pytest.mark.parametrize("rule", RULES)
def test_measured_acceptance_agrees_with_the_closed_form_on_a_measured_curve(rule: AcceptanceRule) -> None:
    curve = CostCurve((10.5, 14.0, 18.5, 22.0, 25.0, 28.0, 30.0, 32.0))
    rows = simulate(measured_workload([0.9, 0.8, 0.7, 0.75]), rule=rule, curve=curve, draft_cost=0.0, num_rounds=400)
    assert_agree(rows)
    assert rows[4].speedup_closed_form == pytest.approx(expected_tokens([0.9, 0.8, 0.7, 0.75]) * 10.5 / 25.0, rel=1e-12)


def test_speedup_rises_and_then_falls() -> None:
    rows = simulate(random_workload(1.0), draft_cost=0.1, num_rounds=600)
    speedups = [row.speedup_simulated for row in rows]
    best = int(np.argmax(speedups))
    assert 0 < best < 12
    assert speedups[best] > 1.3 * speedups[0]
    assert speedups[12] < 0.85 * speedups[best]
    assert rows[0].speedup_simulated == rows[0].speedup_closed_form == 1.0


def test_a_naive_count_of_one_call_a_token_would_show_nothing() -> None:
    """Drafts that are all accepted make gamma + 1 tokens a verify call, not one."""
    rows = simulate(measured_workload([1.0]), draft_cost=0.0, num_rounds=20, max_gamma=4)
    assert [row.speedup_simulated for row in rows] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_useless_drafts_only_cost() -> None:
    rows = simulate(measured_workload([0.0]), draft_cost=0.25, num_rounds=20, max_gamma=4)
    assert [row.speedup_simulated for row in rows] == pytest.approx([1 / (1 + 0.25 * g) for g in range(5)])


@pytest.mark.parametrize("rule", RULES)
def test_exact_acceptance_is_what_rounds_show(rule: AcceptanceRule) -> None:
    pair = random_workload(1.5, num_pairs=1, vocab_size=6, seed=9).at(0)[0]
    params = SamplingParams(seed=5, rule=rule)
    accepted = sum(play_round([pair, pair], params, 2 * number) - 1 for number in range(4000))
    assert accepted / 4000 == pytest.approx(acceptance(pair.target, pair.draft, rule), abs=0.03)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_measured_pairs_have_their_rate_under_both_rules(rate: float, rule: AcceptanceRule) -> None:
    assert measured_workload([rate]).rates(3, rule) == pytest.approx([rate] * 3)


def test_the_text_stays_the_targets() -> None:
    """The residual is resampled: the first token of a round has the target's distribution, whatever the draft."""
    target, draft = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.1, 0.8])
    pair = Pair(np.log(target), Distribution(np.arange(3), draft))
    params = SamplingParams(seed=1, rule=AcceptanceRule.REJECTION)
    counts = np.zeros(3)
    for number in range(6000):
        token = draw(pair.draft, 1, 2 * number)
        proposal = Draft((token,), "test", (pair.draft,))
        verdict = judge(np.stack([pair.target_logits] * 2), proposal, Sampler(params), 2 * number)
        counts[verdict.tokens(proposal)[0]] += 1
    assert 0.5 * np.abs(counts / 6000 - target).sum() < 0.02


def test_the_same_seed_gives_the_same_rows() -> None:
    workload = random_workload(1.0, num_pairs=10, seed=2)
    again = random_workload(1.0, num_pairs=10, seed=2)
    assert simulate(workload, num_rounds=30, max_gamma=3) == simulate(again, num_rounds=30, max_gamma=3)
    assert simulate(workload, num_rounds=30, max_gamma=3, seed=1) != simulate(workload, num_rounds=30, max_gamma=3)


@pytest.mark.parametrize("rates", [[], [1.2], [-0.1]])
def test_bad_rates_are_refused(rates: list[float]) -> None:
    with pytest.raises(ValueError, match="acceptance rates"):
        measured_workload(rates)


def test_rates_go_on_with_the_last() -> None:
    workload = measured_workload([0.9, 0.5])
    assert workload.rates(4, AcceptanceRule.COUPLED) == pytest.approx([0.9, 0.5, 0.5, 0.5])
    assert isinstance(workload, Workload)


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(simulate_command)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_command_prints_rows_as_json() -> None:
    rows = json.loads(run("--json", "--rounds", "20"))
    jsonschema.validate(rows, ROW_SCHEMA)
    assert [row["gamma"] for row in rows] == [*range(13)] * 3


def test_command_prints_a_table_and_marks_the_best_gamma() -> None:
    output = run("--rounds", "10", "--max-gamma", "3", "--rates", "0.9", "--curve", "10,11,12,13")
    assert "measured" in output
    assert "*" in output


@pytest.mark.parametrize(("name", "magic"), [("plot.png", b"\x89PNG"), ("plot.svg", b"<?xml")])
def test_command_draws_a_picture(tmp_path: Path, name: str, magic: bytes) -> None:
    run("--rounds", "10", "--max-gamma", "2", "--plot", str(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_command_refuses_another_kind_of_picture(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.png, \.svg"):
        run("--rounds", "10", "--plot", str(tmp_path / "plot.txt"))
    with pytest.raises(ConfigError, match="folder"):
        run("--rounds", "10", "--plot", str(tmp_path / "missing" / "plot.svg"))


def test_a_curve_is_read_from_words_and_from_a_policy_answer(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"decisions": [{"round": 1}], "cost_model": {"verify_ms": [10, 14, 18.5]}}))
    assert read_curve("10,14,18.5") == read_curve(str(path)) == CostCurve((10.0, 14.0, 18.5))


def test_rates_are_read_from_a_list(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text("[0.8, 0.7]")
    assert read_rates(str(path)) == read_rates("0.8,0.7") == [0.8, 0.7]


@pytest.mark.parametrize("text", ["no-such-file.json", "1,-2", "1,nan"])
def test_bad_curves_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--curve"):
        read_curve(text)


def test_a_file_without_rates_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"a": {"b": "c"}}')
    with pytest.raises(ConfigError, match="acceptance_by_position"):
        read_rates(str(path))
    with pytest.raises(ConfigError, match=r"0\.\.1"):
        read_rates("0.5,1.5")
