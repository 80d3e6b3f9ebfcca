"""Every error that we raise says what was wrong and what is allowed, and repeats nothing that came in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared import errors, http
from shared.errors import SouschefError

ROOT = Path(__file__).parents[1]
PACKAGES = ("shared", "edge_agent", "cloud_service")


def our_errors() -> set[str]:
    """Names of all our errors, wherever they are defined."""
    names = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            names |= {
                node.name
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.ClassDef) and node.name.endswith("Error")
            }
    return names


@dataclass(frozen=True)
class Raised:
    """An error made somewhere: its kind, its message with `{}` for what is filled in, None where it is passed on."""

    where: str
    kind: str
    message: str | None
    filled: tuple[str, ...]


def raised() -> Iterator[Raised]:
    """Every place that makes one of our errors, or a ValueError for a caller's value."""
    names = our_errors() | {"ValueError"}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                    kind = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                    if kind in names and node.args:
                        message, filled = _text(node.args[0])
                        yield Raised(f"{path.relative_to(ROOT)}:{node.lineno}", kind, message, filled)


def _text(node: ast.expr) -> tuple[str | None, tuple[str, ...]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value, ()
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
        filled = tuple(ast.unparse(part.value) for part in node.values if isinstance(part, ast.FormattedValue))
        return "".join(map(str, parts)), filled
    if isinstance(node, ast.BinOp):
        left, right = _text(node.left), _text(node.right)
        return (left[0] or "{}") + (right[0] or "{}"), left[1] + right[1]
    return None, (ast.unparse(node),)


ALL = list(raised())
WRITTEN = [error for error in ALL if error.message is not None and not error.message.endswith(": {}")]
"""Those that don't pass on what a library says behind the place where it was."""


def test_there_is_something_to_read() -> None:
    assert len(WRITTEN) > 100
    assert {"BadRequestError", "ConfigError", "ModelFileError", "CloudUnavailableError"} <= {e.kind for e in WRITTEN}


@pytest.mark.parametrize("error", WRITTEN, ids=lambda error: f"{error.where}-{error.kind}")
def test_a_message_is_a_sentence_with_a_cause(error: Raised) -> None:
    message = error.message or ""
    plain = message.replace("{}", " x ")
    assert len(plain.split()) >= 3, f"{message!r} says too little"
    assert not message.endswith((".", "!", " ")), f"{message!r} ends like prose; it stands in front of more"
    assert not re.search(r"(?i)\b(oops|sorry|invalid input|bad request|error occurred|something went wrong)\b", message)


ALLOWED = re.compile(
    r"\b(must|needs?|known|allowed|expected|at most|at least|under|holds|send|use|leave|choose|put|set|list|there is)\b"
    r"|not supported|unknown|doesn't|can't|differ|contradict|does not take|no such|refuses|too complex|is no "
    r"|is not valid|is not a|is not one of|holds no|takes|never|builds it|answered|failed"
)


@pytest.mark.parametrize(
    "error",
    [error for error in WRITTEN if error.kind in ("BadRequestError", "UnsupportedFieldError", "ConfigError")],
    ids=lambda error: error.where,
)
def test_an_error_of_the_callers_says_what_is_allowed(error: Raised) -> None:
    message = error.message or ""
    assert ALLOWED.search(message), message


REQUEST_ERRORS = {
    name
    for name, value in {**vars(errors), **vars(http)}.items()
    if isinstance(value, type) and issubclass(value, errors.RequestError)
}
CALLERS_OWN = re.compile(r"^(value|body\.(?!souschef)\w+|text|content|prompt|message|messages|host|origin|key)$")


@pytest.mark.parametrize(
    "error", [error for error in WRITTEN if error.kind in REQUEST_ERRORS], ids=lambda error: error.where
)
def test_an_error_over_http_repeats_nothing_that_was_sent(error: Raised) -> None:
    assert not [filled for filled in error.filled if CALLERS_OWN.match(filled)]


def test_every_error_is_in_the_tree_that_is_drawn() -> None:
    drawn = set(re.findall(r"\w+Error", errors.__doc__ or ""))
    defined = {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, SouschefError)
    }
    assert defined == drawn
