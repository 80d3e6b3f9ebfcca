"""Event streams in any pieces, with any line ends."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.sse import MAX_LINE_BYTES, PING, SseOverflowError, SseParser, frame


def parse(stream: bytes, sizes: list[int] | None = None) -> list[str]:
    parser, events, start = SseParser(), [], 0
    for size in sizes or []:
        events += parser.feed(stream[start : start + size])
        start += size
    return events + parser.feed(stream[start:])


def test_a_frame_is_ascii_and_comes_back() -> None:
    content = {"text": "a\u2028b\u0085c\nd", "n": [1, 2]}
    data = frame(content)
    assert data.isascii()
    assert [json.loads(event) for event in parse(data)] == [content]


@pytest.mark.parametrize("raw", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"])
def test_only_newlines_end_a_line(raw: str) -> None:
    assert parse(f"data: a{raw}b\n\n".encode()) == [f"a{raw}b"]


@given(
    events=st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), min_size=1)),
    end=st.sampled_from(["\n", "\r", "\r\n"]),
    sizes=st.lists(st.integers(0, 7), max_size=60),
)
def test_pieces_and_line_ends_change_nothing(events: list[str], end: str, sizes: list[int]) -> None:
    stream = "".join(f"data: {event}{end}{end}" for event in events).encode()
    assert parse(stream, sizes) == events


def test_comments_other_fields_and_unfinished_events_are_skipped() -> None:
    assert parse(PING + b"event: x\nid: 1\ndata:a\ndata: b\n\ndata: lost") == ["a\nb"]


def test_a_line_that_never_ends_is_an_error() -> None:
    parser = SseParser()
    parser.feed(b"x" * MAX_LINE_BYTES)
    with pytest.raises(SseOverflowError):
        parser.feed(b"x")
