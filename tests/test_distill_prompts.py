"""The prompts that a head is trained on: what they are made of, and that no benchmark's text is among them."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections import Counter
from pathlib import Path

import pytest

from edge_agent.distill.prompts import NUMBERS, WORDS_IN, Prompt, PromptBook, read_book, slots
from edge_agent.distill.shipped_text import LONG_NEWS_CHARS, NEWS_CHARS, TextRoots, own_pools, shipped_pools
from shared.errors import ConfigError

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


def test_own_texts_become_passages_that_prompts_are_made_of(roots: TextRoots, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    paragraphs = [f"{number}. {'The mayor spoke of it. ' * 11}".strip() for number in range(6)]
    (folder / "a.txt").write_text("\n\n".join(paragraphs))
    (folder / "lines.txt").write_text("A short line.\n" + "Long line. " * 400)
    (folder / "other.md").write_text("Not plain text. " * 40)
    pools = own_pools(folder, seed=1)
    assert pools == own_pools(folder, seed=1)
    assert set(paragraphs) < set(pools["news"])
    assert "\n\n".join(paragraphs[:4]) in pools["long_news"]
    assert not [text for text in pools["news"] if not NEWS_CHARS[0] <= len(text) <= NEWS_CHARS[1]]
    assert not [text for text in pools["long_news"] if not LONG_NEWS_CHARS[0] <= len(text) <= LONG_NEWS_CHARS[1]]
    assert any("Long line." in text for text in pools["long_news"])
    assert "Not plain" not in str(pools)
    prompts = PromptBook.load({**shipped_pools(roots, 1), **pools}).compose(1500, 1, 0.15)
    kinds = {prompt.kind for prompt in prompts if any("The mayor spoke" in turn for turn in prompt.turns)}
    assert kinds == {"summary", "retrieval", "extraction"}


def test_own_texts_that_are_of_no_use_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        own_pools(tmp_path / "missing", 1)
    with pytest.raises(ConfigError, match=r"no \.txt file"):
        own_pools(tmp_path, 1)
    (tmp_path / "a.txt").write_text("Too little.")
    with pytest.raises(ConfigError, match="at least 200 characters"):
        own_pools(tmp_path, 1)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match=r"b\.txt can't be read"):
        own_pools(tmp_path, 1)


def test_every_slot_of_the_templates_is_known() -> None:
    book = read_book()
    others = {"passage", "long_passage", "passage_de", "passage_zh", "description", "package", "function"}
    others |= {"function_head", "news", "long_news", *(f"sentence_{code}" for code in ("en", "zh", "de", "fr", "es"))}
    known = {*book["pools"], *NUMBERS, *others}
    turns = [entry if isinstance(entry, list) else [entry] for found in book["templates"].values() for entry in found]
    assert {slot.removeprefix(WORDS_IN) for entry in turns for slot in slots(entry)} <= known
    assert set(book["weights"]) == set(book["templates"])
    assert not [name for name, pool in book["pools"].items() if len(pool) != len(set(pool))]


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
