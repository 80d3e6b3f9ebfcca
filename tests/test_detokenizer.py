"""Text that is sent is never taken back: whole characters, no part of a stop string, the same as decoding at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.detokenizer import IncrementalDetokenizer


@dataclass
class Pieces:
    """A tokenizer whose token i is the i-th piece of bytes."""

    pieces: Sequence[bytes]
    special_ids: frozenset[int] = field(default_factory=frozenset)
    strips_first_space: bool = False

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """The data cut at these positions, which may fall into the middle of a character and may repeat."""
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def stream(detokenizer: IncrementalDetokenizer, num_tokens: int) -> Iterator[str]:
    for token_id in range(num_tokens):
        yield detokenizer.push(token_id)
    yield detokenizer.flush()


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the text has to end: the first stop string to be complete, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end - max(lengths)
    return None


TEXTS = st.text(st.sampled_from("aab cé😀你\n") | st.characters(exclude_categories=["Cs"]), max_size=40)
CUTS = st.lists(st.integers(0, 120), max_size=40)
STOPS = st.lists(st.text(st.sampled_from("ab cé😀"), min_size=1, max_size=6), max_size=4)


@given(TEXTS, CUTS)
def test_joined_pieces_are_the_text(text: str, cuts: list[int]) -> None:
    pieces = cut(text.encode(), cuts)
    detokenizer = IncrementalDetokenizer(Pieces(pieces))
    sent = list(stream(detokenizer, len(pieces)))
    assert "".join(sent) == text
    assert "�" in text or not any("�" in piece for piece in sent)
    assert detokenizer.num_returned_tokens == len(pieces)


@given(st.binary(max_size=60), CUTS)
def test_bytes_that_are_no_text_come_out_as_when_decoded_at_once(data: bytes, cuts: list[int]) -> None:
    pieces = cut(data, cuts)
    sent = "".join(stream(IncrementalDetokenizer(Pieces(pieces)), len(pieces)))
    assert sent == data.decode(errors="replace")


@given(TEXTS, CUTS, STOPS)
def test_a_stop_string_ends_the_text_wherever_tokens_end(text: str, cuts: list[int], stops: list[str]) -> None:
    pieces = cut(text.encode(), cuts)
    detokenizer = IncrementalDetokenizer(Pieces(pieces), stops)
    expected = first_stop(text, stops)
    sent = ""
    for token_id in range(len(pieces)):
        sent += detokenizer.push(token_id)
        if detokenizer.stopped:
            break
        # Held back is the longest end of the text so far that a stop string begins with, and no more.
        known = b"".join(pieces[: token_id + 1]).decode(errors="ignore")
        begun = [n for stop in stops for n in range(1, len(stop)) if known.endswith(stop[:n])]
        assert sent == known[: len(known) - max(begun, default=0)]
    sent += detokenizer.flush()
    assert detokenizer.stopped == (expected is not None)
    assert sent == (text if expected is None else text[:expected])
    assert detokenizer.push(0) == detokenizer.flush() == "" or expected is None


@given(TEXTS, CUTS, STOPS)
def test_returned_tokens_cover_the_returned_text(text: str, cuts: list[int], stops: list[str]) -> None:
    pieces = [piece for piece in cut(text.encode(), cuts) if piece]
    detokenizer = IncrementalDetokenizer(Pieces(pieces), stops)
    sent, num_pushed = "", 0
    while num_pushed < len(pieces) and not detokenizer.stopped:
        sent += detokenizer.push(num_pushed)
        num_pushed += 1
        num_returned = detokenizer.num_returned_tokens
        covered = b"".join(pieces[:num_returned])
        if detokenizer.stopped:
            assert covered.startswith(sent.encode())
            assert num_returned == 0 or len(b"".join(pieces[: num_returned - 1])) < len(sent.encode())
        else:
            assert sent.encode().startswith(covered)
            assert num_returned == num_pushed or len(covered) + len(pieces[num_returned]) > len(sent.encode())


def test_an_emoji_of_many_tokens_comes_as_whole_characters() -> None:
    pieces = [bytes([byte]) for byte in "👩‍👩‍👧!".encode()]
    sent = [piece for piece in stream(IncrementalDetokenizer(Pieces(pieces)), len(pieces)) if piece]
    assert sent == ["👩", "\u200d", "👩", "\u200d", "👧", "!"]


def test_an_unfinished_character_is_flushed_as_a_replacement() -> None:
    detokenizer = IncrementalDetokenizer(Pieces(["😀".encode()[:3]]))
    assert detokenizer.push(0) == ""
    assert detokenizer.num_returned_tokens == 0
    assert detokenizer.flush() == "�"
    assert detokenizer.num_returned_tokens == 1


@pytest.mark.parametrize(("continues", "expected"), [(False, "Hello world!"), (True, " Hello world!")])
def test_only_the_first_space_of_a_marked_text_goes(continues: bool, expected: str) -> None:
    tokenizer = Pieces([b" Hello", b" world", b"!"], strips_first_space=True)
    assert "".join(stream(IncrementalDetokenizer(tokenizer, continues=continues), 3)) == expected


def test_the_first_space_goes_after_a_control_token_too() -> None:
    tokenizer = Pieces([b"<s>", b" Hello", b" world"], frozenset({0}), strips_first_space=True)
    assert "".join(stream(IncrementalDetokenizer(tokenizer), 3)) == "Hello world"


def test_control_tokens_have_no_text_and_break_no_character() -> None:
    tokenizer = Pieces(["é".encode()[:1], b"<s>", "é".encode()[1:]], frozenset({1}))
    assert list(stream(IncrementalDetokenizer(tokenizer), 3)) == ["", "", "é", ""]


def test_text_that_only_looked_like_a_stop_string_is_sent() -> None:
    detokenizer = IncrementalDetokenizer(Pieces([b"a", b"##", b"#b", b"##"]), ["####"])
    assert [detokenizer.push(n) for n in range(4)] == ["a", "", "###b", ""]
    assert detokenizer.num_returned_tokens == 3
    assert detokenizer.flush() == "##"
    assert not detokenizer.stopped


def test_what_is_held_back_never_grows() -> None:
    # A long answer that keeps almost matching must not make each push dearer: what is held is less than a stop string.
    tokenizer = Pieces([b"ab"])
    detokenizer = IncrementalDetokenizer(tokenizer, ["ab" * 10 + "c"])
    for _ in range(10_000):
        detokenizer.push(0)
        assert len(detokenizer._held) <= 20
        assert len(detokenizer._token_spans) <= 11
