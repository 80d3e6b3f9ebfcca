"""An answer's text told apart into what it says and what it calls, as it comes.

The form is Qwen's and Hermes': `<tool_call>`, a JSON object with `name` and `arguments`, `</tool_call>`. Small models
forget the tags: an answer that begins with such an object, in a code fence or not, is a call if it names a known tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from edge_agent.answer_grammar import CALL_CLOSE, CALL_OPEN


@dataclass(frozen=True)
class Said:
    """More text."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call number `index` of the function `name`; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True)
class ArgumentsAdded:
    """More of the arguments' JSON of call number `index`."""

    index: int
    text: str


AnswerPart = Said | CallBegun | ArgumentsAdded


class AnswerReader(Protocol):
    """Reads an answer's text, piece by piece. What it tells doesn't depend on how the text is cut."""

    num_calls: int

    def feed(self, text: str) -> list[AnswerPart]:
        """What the text adds."""

    def finish(self) -> list[AnswerPart]:
        """The answer has ended: what was held back."""


class PlainReader:
    """For answers that call nothing: all of it is said."""

    num_calls = 0

    def feed(self, text: str) -> list[AnswerPart]:
        """The text."""
        return [Said(text)] if text else []

    def finish(self) -> list[AnswerPart]:
        """Nothing was held back."""
        return []


class _State(Enum):
    START = auto()
    TEXT = auto()
    HEAD = auto()
    ARGUMENTS = auto()
    TAIL = auto()
    BARE_TAIL = auto()


_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL)
_SPACE = " \t\r\n"
_FENCE = "```"
_BARE = re.compile(rf"\s*(?:{_FENCE}(?:json)?\s*)?" + _HEAD.pattern, re.DOTALL)


def _beginnings(pieces: Sequence[str]) -> str:
    """A pattern for every text that begins what the pieces, one after the other, match."""
    pattern = ""
    for piece in reversed(pieces):
        pattern = f"(?:{piece}{pattern})?"
    return pattern


_OBJECT = [
    "{",
    r"\s*",
    *'"name"',
    r"\s*",
    ":",
    r"\s*",
    '"',
    r'(?:[^"\\]|\\.)*',
    '"',
    r"\s*",
    ",",
    r"\s*",
    *'"arguments"',
]
_MAY_BECOME_BARE = re.compile(
    r"\s*(?:"
    + _beginnings([*_FENCE, r"\s*", *_OBJECT, r"\s*", ":", r"\s*"])
    + "|"
    + _beginnings([*_FENCE, *"json", r"\s*", *_OBJECT, r"\s*", ":", r"\s*"])
    + "|"
    + _beginnings([*_OBJECT, r"\s*", ":", r"\s*"])
    + ")",
    re.DOTALL,
)


class CallReader:
    """Finds calls. What looks like one and isn't is text, from its `<tool_call>` on; nothing is dropped but the blanks
    around calls."""

    def __init__(self, names: Collection[str] = ()) -> None:
        """names: the known tools, for calls without tags."""
        self.num_calls = 0
        self._names = names
        self._state = _State.START if names else _State.TEXT
        self._bare = False
        self._held = ""
        self._after_call = False
        self._scanner = _ObjectScanner()

    def feed(self, text: str) -> list[AnswerPart]:
        """What the text adds."""
        self._held += text
        parts: list[AnswerPart] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[AnswerPart]:
        """An unfinished head is text; of an unfinished call the arguments have been told already."""
        held, self._held = self._held, ""
        if self._state in (_State.TAIL, _State.BARE_TAIL) or (self.num_calls and not held.strip()):
            return []
        if self._state is _State.HEAD:
            whole = _whole_call(held)
            if whole is not None:
                return self._told_at_once(*whole)
            held = CALL_OPEN + held
        return [Said(held)] if held else []

    def _step(self, parts: list[AnswerPart]) -> bool:
        """Go on by one state, if what is held allows it."""
        step = {
            _State.START: self._read_start,
            _State.TEXT: self._read_text,
            _State.HEAD: self._read_head,
            _State.ARGUMENTS: self._read_arguments,
            _State.TAIL: self._read_tail,
            _State.BARE_TAIL: self._read_bare_tail,
        }
        return step[self._state](parts)

    def _read_start(self, parts: list[AnswerPart]) -> bool:
        """A call without tags, or text."""
        head = _BARE.match(self._held)
        if head is None and _MAY_BECOME_BARE.fullmatch(self._held):
            return False
        self._state = _State.TEXT
        if head and _string(head[1]) in self._names:
            self._bare = True
            self._begin_call(parts, head)
        return True

    def _read_text(self, parts: list[AnswerPart]) -> bool:
        if self._after_call:
            self._held = self._held.lstrip(_SPACE)
        said, opening, rest = self._held.partition(CALL_OPEN)
        if opening:
            said = said.rstrip(_SPACE)
            self._held, self._state = rest, _State.HEAD
        else:
            # What may become an opening is held back, and so are blanks that would stand before it.
            said = said[: len(said) - _overlap(said, CALL_OPEN)].rstrip(_SPACE)
            self._held = self._held[len(said) :]
        if said:
            parts.append(Said(said))
            self._after_call = False
        return bool(opening)

    def _read_head(self, parts: list[AnswerPart]) -> bool:
        head = _HEAD.match(self._held)
        if head and _string(head[1]) is not None:
            self._begin_call(parts, head)
            return True
        body, closing, rest = self._held.partition(CALL_CLOSE)
        if not closing:
            return False
        whole = _whole_call(body)
        parts.extend([Said(CALL_OPEN + body + CALL_CLOSE)] if whole is None else self._told_at_once(*whole))
        self._held, self._state, self._after_call = rest, _State.TEXT, whole is not None
        return True

    def _read_arguments(self, parts: list[AnswerPart]) -> bool:
        end = self._scanner.end_in(self._held)
        arguments = self._held if end is None else self._held[:end]
        if arguments:
            parts.append(ArgumentsAdded(self.num_calls - 1, arguments))
        self._held = self._held[len(arguments) :]
        if end is not None:
            self._state = _State.BARE_TAIL if self._bare else _State.TAIL
            self._bare = False
        return end is not None

    def _read_tail(self, parts: list[AnswerPart]) -> bool:
        """The object's brace and the closing; where something else stands, text goes on."""
        rest = self._held.lstrip(_SPACE).removeprefix("}").lstrip(_SPACE)
        if CALL_CLOSE.startswith(rest) and rest != CALL_CLOSE:
            return False
        self._held, self._state, self._after_call = rest.removeprefix(CALL_CLOSE), _State.TEXT, True
        return True

    def _read_bare_tail(self, parts: list[AnswerPart]) -> bool:
        """The object's brace and the fence's end."""
        rest = self._held.lstrip(_SPACE).removeprefix("}").lstrip(_SPACE)
        if _FENCE.startswith(rest) and rest != _FENCE:
            return False
        self._held, self._state, self._after_call = rest.removeprefix(_FENCE), _State.TEXT, True
        return True

    def _begin_call(self, parts: list[AnswerPart], head: re.Match[str]) -> None:
        parts.append(CallBegun(self.num_calls, _string(head[1]) or ""))
        self.num_calls += 1
        self._held, self._state, self._scanner = self._held[head.end() :], _State.ARGUMENTS, _ObjectScanner()

    def _told_at_once(self, name: str, arguments: str) -> list[AnswerPart]:
        index = self.num_calls
        self.num_calls += 1
        return [CallBegun(index, name), ArgumentsAdded(index, arguments)]


class _ObjectScanner:
    """Finds where a JSON object ends, whatever pieces it comes in."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end_in(self, text: str) -> int | None:
        """Index past the object's last brace, if it is in this piece."""
        for index, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None


def _whole_call(body: str) -> tuple[str, str] | None:
    """(name, arguments) of a call in another order or with other fields; None if it is none."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _string(literal: str) -> str | None:
    try:
        value = json.loads(literal)
    except ValueError:
        return None
    return str(value)


def _overlap(text: str, opening: str) -> int:
    """Length of the longest end of the text that begins the opening."""
    return next((n for n in range(min(len(text), len(opening)), 0, -1) if text.endswith(opening[:n])), 0)
