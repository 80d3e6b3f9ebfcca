"""The prompts that a head is trained on: what they are made of, and that no benchmark's text is among them."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections import Counter
from pathlib import Path

import pytest

from edge_agent.distill.prompts import Prompt, PromptBook
from edge_agent.distill.shipped_text import TextRoots, shipped_pools

MANUAL = """.TH FROB 1
.SH DESCRIPTION
.B frob
turns every knob of the machine until \\fIsomething\\fP happens, and goes on with this until somebody comes to stop it.
It reads the names of the knobs from its standard input, one a line, and writes down what it has turned, with the time
and the angle in degrees, so that all of it can be turned back later on by hand or by another program.
.PP
Short.
"""
STATUS = """Package: frob
Status: install ok installed
Description: turns knobs
 This program turns the knobs of a machine, one after the other, and writes down which it has turned.
 .
 It is of use to people who have many knobs and little time, and to nobody else.

"""
FUNCTION = '''def turn(knob, angle):
    """Turn it."""
    before = knob.angle
    knob.angle += angle
    return before
'''
SHINGLES = Path(__file__).with_name("specbench_shingles.txt")
SHINGLE_WORDS = 8


@pytest.fixture
def roots(tmp_path: Path) -> TextRoots:
    """A machine that ships one manual page and knows one package."""
    page = tmp_path / "share" / "man" / "man1" / "frob.1.gz"
    page.parent.mkdir(parents=True)
    page.write_bytes(gzip.compress(MANUAL.encode()))
    (tmp_path / "share" / "man" / "man1" / "broken.1.gz").write_bytes(b"not a gzip file")
    (tmp_path / "status").write_text(STATUS)
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "knobs.py").write_text(FUNCTION)
    return TextRoots(tmp_path / "share", tmp_path / "status", tmp_path / "python")


def test_snippets_come_from_what_is_shipped(roots: TextRoots) -> None:
    pools = shipped_pools(roots, seed=1)
    assert pools["passage"][0].startswith("frob turns every knob of the machine until something happens")
    assert pools["package"] == ["frob (turns knobs)"]
    assert "little time" in pools["description"][0]
    assert pools["function"][0].startswith("def turn")
    assert pools["function_head"] == ['def turn(knob, angle):\n    """Turn it."""']
    assert "sentence_de" not in pools  # nothing of the kind is there


def test_the_same_seed_gives_the_same_prompts(roots: TextRoots) -> None:
    first, again, other = (_prompts(roots, seed, 50) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_prompts_are_of_every_kind_with_every_slot_filled(roots: TextRoots) -> None:
    prompts = _prompts(roots, 1, 1500)
    assert [prompt.index for prompt in prompts] == list(range(1500))
    kinds = Counter(prompt.kind for prompt in prompts)
    assert len(kinds) == 18
    assert min(kinds.values()) > 10
    assert not [turn for prompt in prompts for turn in prompt.turns if re.search(r"\{\w+(\.\d+)?\}", turn)]
    assert 0.1 < sum(prompt.is_sampled for prompt in prompts) / 1500 < 0.2
    assert len({prompt.turns for prompt in prompts}) == 1500


def test_a_template_without_its_pool_is_left_out(roots: TextRoots) -> None:
    book = PromptBook.load(shipped_pools(roots, seed=1))
    assert not [turns for turns in book.templates["translation"] if "{sentence_zh}" in turns[0]]
    assert [turns for turns in book.templates["summary"] if "{passage}" in turns[0]]


def test_no_text_of_spec_bench_is_in_the_prompts() -> None:
    """The hashes are of every run of eight words at the beginnings of the development split's turns."""
    forbidden = set(SHINGLES.read_text().split())
    assert len(forbidden) > 1000
    machine = TextRoots()
    for prompt in PromptBook.load(shipped_pools(machine, 1)).compose(4000, 1, 0.15):
        for turn in prompt.turns:
            assert not forbidden & set(shingles(turn)), turn


def shingles(text: str) -> list[str]:
    """Hashes of all runs of eight words."""
    words = re.findall(r"\w+", text.lower())
    runs = (" ".join(words[first : first + SHINGLE_WORDS]) for first in range(len(words) - SHINGLE_WORDS + 1))
    return [hashlib.sha256(run.encode()).hexdigest()[:10] for run in runs]


def _prompts(roots: TextRoots, seed: int, count: int) -> list[Prompt]:
    return list(PromptBook.load(shipped_pools(roots, seed)).compose(count, seed, 0.15))
