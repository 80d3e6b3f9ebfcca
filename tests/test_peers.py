"""The side-by-side benchmark: engines that are libraries behind HTTP, and what is made of the measurements."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence

import pytest
from rich.console import Console

from benchmarks.__main__ import AUTO, DIRECT, Measured, Report
from benchmarks.client import Timing, chat
from benchmarks.library_server import LibraryServer
from benchmarks.servers import Usage
from shared.tokenizer import Tokenizer
from tests.toy_engine import TEMPLATE, byte_tokenizer

END_ID = 257


class Parrot:
    """Says its prompt's last bytes, then ends, then goes on: what comes after an end is nobody's."""

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        yield from [*"é, twice: é".encode()][:max_tokens]
        yield END_ID
        yield ord("x")


def with_template() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_a_library_answers_as_a_server_does() -> None:
    server = LibraryServer(0, Parrot(), with_template())
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        whole, cut = chat(url, "hi", 99), chat(url, "hi", 3)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (whole.text, whole.num_tokens) == ("é, twice: é", 13)
    assert (cut.text, cut.num_tokens) == ("é,", 3)


def measured(speeds: dict[str, float], cpu_s: float) -> Measured:
    timings = {category: [Timing("", 33, 0.1, 32 / speed, {})] for category, speed in speeds.items()}
    return Measured(timings, cpu_s)


@pytest.fixture
def report() -> Report:
    """Two ways of one peer, one of another; one category in which somebody said next to nothing."""
    found = {
        "peer": measured({"a": 10, "b": 10, "c": 10}, 6.6),
        "peer:lookup": measured({"a": 20, "b": 8, "c": 10}, 6.6),
        "other": measured({"a": 5, "b": 5, "c": 5}, 6.6),
        DIRECT: measured({"a": 10, "b": 20, "c": 10}, 6.6),
        AUTO: measured({"a": 40, "b": 20, "c": 10}, 3.3),
    }
    found["other"].timings["c"] = [Timing("", 2, 0.1, 0.1, {})]
    return Report(found, {name: Usage(1.0, 10**9) for name in found}, floor_s=0.025)


def test_each_peer_is_taken_at_its_best(report: Report) -> None:
    assert report.categories == ["a", "b"]
    assert report.best_ways() == ["peer:lookup", "other"]
    assert report.ratios(AUTO, "peer:lookup") == pytest.approx([2.0, 2.5])
    assert report.mean(AUTO, DIRECT) == pytest.approx(2.0)


def test_the_table_says_what_the_bars_are_about(report: Report) -> None:
    out = io.StringIO()
    report.print(Console(file=out, width=200))
    said = out.getvalue()
    assert f"{AUTO} over peer:lookup, its best way here: 2.236, worst category 2.00" in said
    assert f"{AUTO} over {DIRECT}: 2.000, worst 1.00 (b)" in said
    assert f"CPU seconds a token, {AUTO} over {DIRECT}: 0.50" in said
    assert "share of the memory's bandwidth, ours, direct: 0.35" in said
