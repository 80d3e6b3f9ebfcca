"""The bench: what it counts is what happened, its figures follow from its runs, and its outputs keep their shape."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from typer.testing import CliRunner

from edge_agent.bench.answer_timing import AnswerTiming
from edge_agent.bench.bench_report import BenchReport, bench_report, conditions, rows, table
from edge_agent.bench.contender import LocalContender, local_contenders
from edge_agent.bench.html_report import html_report
from edge_agent.bench.measure import Run, measure, num_runs
from edge_agent.bench.peer import PeerContender
from edge_agent.bench.resident_memory import added_bytes
from edge_agent.bench.summary import spread, summarise
from edge_agent.bench.svg_chart import bars, lines
from edge_agent.commands.bench import bench as bench_command
from edge_agent.energy import CpuTimeMeter
from edge_agent.measured_input import read_curve, read_rates
from edge_agent.scenarios import Scenario
from shared.errors import ConfigError, ModelFileError
from tests.servers import run_server
from tests.toy_engine import Script, script_engine, table_engine, toy_settings

NUMBER = {"type": ["number", "null"]}
SPREAD = {
    "oneOf": [
        {"type": "null"},
        {
            "type": "object",
            "properties": {name: {"type": "number"} for name in ("median", "p25", "p75")},
            "required": ["median", "p25", "p75"],
            "additionalProperties": False,
        },
    ]
}
REPORT_SCHEMA = {
    "type": "object",
    "required": ["conditions", "contenders", "runs"],
    "additionalProperties": False,
    "properties": {
        "conditions": {
            "type": "object",
            "required": ["format", "at", "machine", "cores", "model", "draft", "draft_weight_bytes", "energy_source"],
            "properties": {
                "format": {"const": 1},
                "verify_ms": {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}},
                "energy_source": {"enum": ["rapl", "battery", "cpu_time_model", "simulated"]},
            },
        },
        "contenders": {
            "type": "array",
            "minItems": 3,
            "items": {
                "type": "object",
                "required": ["name", "answers", "tokens", "equal_texts", "categories", "acceptance_by_position"],
                "properties": {
                    "latency_s": SPREAD,
                    "first_token_s": SPREAD,
                    "tokens_per_second": SPREAD,
                    "speedup": NUMBER,
                    "decode_speedup": NUMBER,
                    "drafting_share": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
                    "acceptance_rate": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
                    "cpu_s_per_token": NUMBER,
                    "joules_per_token": NUMBER,
                    "categories": {"type": "object", "additionalProperties": SPREAD},
                },
            },
        },
        "runs": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["contender", "repeat", "prompt", "category", "tokens", "latency_s", "first_token_s"],
            },
        },
    },
}

SCENARIOS = (
    Scenario("repeat", "aaaa bbbb aaaa bbbb aaaa"),
    Scenario("prediction", "say it", prediction="Hello, world! Hello, world!"),
)


def run_bench(*, repeats: int = 2, tokens: int = 24) -> tuple[BenchReport, list[Run]]:
    """A bench over a script that loops, so that look-ups find something."""

    async def measured() -> tuple[BenchReport, list[Run]]:
        engine = script_engine(Script("Hello, world! ", ends=False))
        try:
            meter = CpuTimeMeter(4.0)
            contenders = local_contenders(engine, meter, 4, predictions=True)
            runs = await measure(contenders, SCENARIOS, max_tokens=tokens, repeats=repeats)
            found = conditions(engine, meter.source, gamma=4, max_tokens=tokens, repeats=repeats, prompts=2)
            assert len(runs) == num_runs(contenders, SCENARIOS, repeats)
            return bench_report(found, [contender.name for contender in contenders], runs), runs
        finally:
            await engine.close()

    return asyncio.run(measured())


@pytest.fixture(scope="module")
def measured() -> tuple[BenchReport, list[Run]]:
    return run_bench()


def figures(report: BenchReport, name: str) -> Any:
    return next(found for found in report["contenders"] if found["name"] == name)


def test_report_keeps_its_schema(measured: tuple[BenchReport, list[Run]]) -> None:
    jsonschema.validate(json.loads(json.dumps(measured[0])), REPORT_SCHEMA)


def test_all_contenders_answer_and_say_the_same(measured: tuple[BenchReport, list[Run]]) -> None:
    report, runs = measured
    assert [found["name"] for found in report["contenders"]] == ["direct", "ngram", "prediction", "auto"]
    for name in ("ngram", "auto"):
        assert figures(report, name)["equal_texts"] == [4, 4]
    assert figures(report, "prediction")["equal_texts"] == [2, 2]
    assert {run.timing.num_tokens for run in runs} == {24}


def test_speculation_shows_in_the_counts(measured: tuple[BenchReport, list[Run]]) -> None:
    report, _ = measured
    direct, ngram = figures(report, "direct"), figures(report, "ngram")
    assert direct["tokens_per_round"] == 1.0
    assert direct["acceptance_rate"] is None
    assert ngram["tokens_per_round"] > 1.2
    assert 0 < ngram["acceptance_rate"] <= 1
    assert ngram["acceptance_by_position"][0] == pytest.approx(1.0)
    assert ngram["cpu_s_per_token"] >= 0


def test_runs_are_interleaved_and_take_turns_to_begin(measured: tuple[BenchReport, list[Run]]) -> None:
    _, runs = measured
    first = [run.contender for run in runs if (run.repeat, run.prompt) == (1, 0)]
    second = [run.contender for run in runs if (run.repeat, run.prompt) == (2, 0)]
    assert sorted(first) == sorted(second) == ["auto", "direct", "ngram"]
    assert first[0] != second[0]
    assert [run.prompt for run in runs] == sorted([run.prompt for run in runs if run.repeat == 1]) * 2


def test_every_answer_begins_with_an_empty_cache() -> None:
    async def fed() -> tuple[int, int]:
        script = Script("Hello, world! ", ends=False)
        engine = script_engine(script)
        try:
            contender = LocalContender("direct", engine, CpuTimeMeter(1.0), 0)
            await contender.answer(SCENARIOS[0], 4)
            held = engine.target.slots.num_cached_tokens
            engine.forget_prompts()
            return held, engine.target.slots.num_cached_tokens
        finally:
            await engine.close()

    held, after = asyncio.run(fed())
    assert held > 0
    assert after == 0


def timing(total_s: float, *, tokens: int = 11, first_s: float = 0.5, text: str = "x") -> AnswerTiming:
    return AnswerTiming(text, tokens, total_s, first_s, num_rounds=tokens, num_drafted=0, draft_s=0.0)


def test_speedup_is_the_geometric_mean_over_categories_of_ratios_of_medians() -> None:
    runs = [
        *(Run("direct", repeat, 0, "a", timing(1.5)) for repeat in (1, 2, 3)),
        *(Run("direct", repeat, 1, "b", timing(1.5)) for repeat in (1, 2, 3)),
        *(Run("auto", repeat, 0, "a", timing(value)) for repeat, value in ((1, 1.0), (2, 1.0), (3, 9.0))),
        *(Run("auto", repeat, 1, "b", timing(2.5)) for repeat in (1, 2, 3)),
    ]
    direct, auto = summarise(["direct", "auto"], runs)
    assert direct["speedup"] == direct["decode_speedup"] == pytest.approx(1.0)
    assert auto["decode_speedup"] == pytest.approx((2.0 * 0.5) ** 0.5)
    assert auto["speedup"] == pytest.approx((1.5 * 0.6) ** 0.5)


def test_different_texts_are_counted() -> None:
    runs = [Run("direct", 1, 0, "a", timing(1.0)), Run("auto", 1, 0, "a", timing(1.0, text="y"))]
    assert summarise(["auto"], runs)[0]["equal_texts"] == [0, 1]


def test_spread_of_nothing_is_unknown_and_of_one_is_that_one() -> None:
    assert spread([None, None]) is None
    assert spread([2.0]) == {"median": 2.0, "p25": 2.0, "p75": 2.0}
    assert spread([1.0, None, 2.0, 3.0]) == {"median": 2.0, "p25": 1.5, "p75": 2.5}


def test_an_answer_of_one_round_says_nothing_of_decoding() -> None:
    assert AnswerTiming("x", 3, 1.0, 1.0, num_first_tokens=3).tokens_per_second is None
    assert timing(1.5).tokens_per_second == pytest.approx(10.0)


def test_bench_output_feeds_the_simulator(measured: tuple[BenchReport, list[Run]], tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    report = json.loads(json.dumps(measured[0]))
    report["conditions"]["verify_ms"] = [10.0, 12.0]
    path.write_text(json.dumps(report))
    assert read_rates(str(path)) == pytest.approx(figures(report, "ngram")["acceptance_by_position"])
    assert read_curve(str(path)).values == (10.0, 12.0)


class Reader(HTMLParser):
    """Fails on what would need a network; keeps the tags."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert tag not in ("script", "link", "img", "iframe", "object", "embed")
        assert not {"src", "href"} & {name for name, _ in attrs}


def test_html_report_is_one_file_that_needs_no_network(measured: tuple[BenchReport, list[Run]]) -> None:
    report = json.loads(json.dumps(measured[0]))
    report["conditions"]["verify_ms"] = [10.0, 12.0, 15.0]
    report["conditions"]["model"] = "<script>alert(1)</script>"
    page = html_report(report)
    reader = Reader()
    reader.feed(page)
    assert reader.tags.count("svg") >= 3
    assert "url(" not in page
    assert not re.search(r"https?://", page)
    for name in ("direct", "ngram", "prediction", "auto"):
        assert name in page


def test_table_has_a_row_for_each_figure(measured: tuple[BenchReport, list[Run]]) -> None:
    labels = [row.label for row in rows(measured[0])]
    for label in ("tokens/s", "first token, s", "drafts accepted", "time drafting", "joules a token"):
        assert label in labels
    assert table(measured[0]).row_count == len(labels)


def test_charts_cope_with_holes() -> None:
    assert "<rect" not in bars({"a": {"x": None}}, "s").partition("</svg>")[0]
    assert lines({"x": [], "y": [1.0, 2.0]}, "s", "n").count("<circle") == 2


@pytest.fixture(scope="module")
def peer_url() -> Iterator[str]:
    with run_server(toy_settings(), lambda: script_engine(Script("Hi there", ends=True))) as server:
        yield server.url


def ask(peer: PeerContender) -> AnswerTiming:
    async def asked() -> AnswerTiming:
        async with peer:
            return await peer.answer(SCENARIOS[0], 30)

    return asyncio.run(asked())


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_peer_is_asked_over_http(peer_url: str, suffix: str) -> None:
    found = ask(PeerContender(peer_url + suffix))
    assert found.text == "Hi there"
    assert found.num_tokens == len("Hi there")
    assert 0 < found.first_token_s <= found.total_s
    assert found.joules is None


def test_peer_that_refuses_is_named(peer_url: str) -> None:
    with pytest.raises(ConfigError, match="answered 404"):
        ask(PeerContender(peer_url, model="another"))


def test_peer_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="can't be reached"):
        ask(PeerContender("http://127.0.0.1:9"))


def test_drafts_of_a_babbling_model_change_no_text() -> None:
    async def texts() -> list[str]:
        engine = table_engine()
        try:
            contenders = local_contenders(engine, CpuTimeMeter(1.0), 3, predictions=False)
            return [(await contender.answer(SCENARIOS[0], 40)).text for contender in contenders]
        finally:
            await engine.close()

    assert len(set(asyncio.run(texts()))) == 1


def test_command_measures_a_real_model(smollm2_directory: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(bench_command)
    page = tmp_path / "report.html"
    flags = ["--preset", "tiny", "--limit", "2", "--tokens", "12", "--repeats", "1", "--json", "--report", str(page)]
    result = CliRunner().invoke(app, flags, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    jsonschema.validate(report, REPORT_SCHEMA)
    assert report["conditions"]["model"] == "smollm2-135m-instruct"
    assert len(report["conditions"]["verify_ms"]) > 1
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_models_memory_is_measured_in_a_process_of_its_own(smollm2_directory: Path, tmp_path: Path) -> None:
    weights = sum(path.stat().st_size for path in smollm2_directory.iterdir())
    assert 0.5 * weights < asyncio.run(added_bytes(smollm2_directory, 1)) < 4 * weights
    with pytest.raises(ModelFileError, match="can't be loaded"):
        asyncio.run(added_bytes(tmp_path, 1))


def test_command_refuses_a_folder_that_is_not_there(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(bench_command)
    with pytest.raises(ConfigError, match="folder"):
        CliRunner().invoke(app, ["--report", str(tmp_path / "no" / "r.html")], catch_exceptions=False)
