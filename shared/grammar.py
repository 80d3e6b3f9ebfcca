"""Grammars over text as constraints on tokens, by llguidance: tens of microseconds a token, and a copy costs less."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from shared.errors import UnsupportedFieldError
from shared.tokenizer import Tokenizer

MAX_CACHED = 64
MAX_LEXER_STATES = 50_000
"""1 to 2 kB each: what a hostile pattern may make one grammar take."""
MAX_REASON_LENGTH = 200
_NOT_ALLOWED = "doesn't satisfy the grammar"
"""llguidance's own words for it; whatever else it complains of is a limit that the grammar has reached."""


class GrammarConstraint:
    """Where one answer stands in its grammar. After the grammar's end only the tokens that end an answer are left."""

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        """param: the request's field that the grammar comes from."""
        self._matcher = matcher
        self._param = param

    def mask(self) -> NDArray[np.bool_]:
        """bool [vocab_size].

        Raises:
            UnsupportedFieldError: the grammar needs more states than are allowed, or leads nowhere.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check_limits()
        allowed = np.unpackbits(bits, bitorder="little").view(np.bool_)
        if not allowed.any():
            raise UnsupportedFieldError(f"{self._param} can't be met: no token may follow", param=self._param)
        return allowed

    def append(self, token: int) -> None:
        """One more token. After the end nothing moves any more.

        Raises:
            UnsupportedFieldError: as `mask`.
        """
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            if _NOT_ALLOWED in self._matcher.get_error():
                raise ValueError(f"token {token} is not allowed here")
            self._check_limits()

    def _check_limits(self) -> None:
        if self._matcher.is_error():
            raise UnsupportedFieldError(
                f"{self._param}: the answer can't be held to it any further, it is too complex; simplify it",
                param=self._param,
            )

    def fork(self) -> GrammarConstraint:
        """A copy; both share what has been compiled."""
        return GrammarConstraint(self._matcher.deep_copy(), self._param)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps those used last. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """The tokenizer is prepared at the first use: it takes about a second and some megabytes."""
        self._tokenizer = tokenizer
        self._prepared: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: str, param: str) -> GrammarConstraint:
        """A constraint at the grammar's start. grammar: llguidance's dialect of Lark; param: the field it comes from.

        Raises:
            UnsupportedFieldError: the grammar is wrong, or holds what can't be followed; the message says what.
        """
        with self._lock:
            matcher = self._compiled.pop(grammar, None) or self._new_matcher(grammar, param)
            self._compiled[grammar] = matcher
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return GrammarConstraint(matcher, param).fork()

    def _new_matcher(self, grammar: str, param: str) -> LLMatcher:
        if not self._tokenizer.eos_ids:
            raise UnsupportedFieldError(f"{param} needs a model that knows how an answer ends", param=param)
        if self._prepared is None:
            self._prepared = _prepare(self._tokenizer)
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._prepared, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)
        if matcher.is_error():
            raise UnsupportedFieldError(f"{param} can't be followed: {_reason(matcher.get_error())}", param=param)
        GrammarConstraint(matcher.deep_copy(), param).mask()  # What fails at once is told before anything is generated.
        return matcher


class _TokenizerView(TokenizerWrapper):
    """Our tokenizer as llguidance wants to see one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.is_tokenizer_wrapper = True
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer

    def __call__(self, s: str) -> list[int]:
        return self._tokenizer.encode(s)


def _prepare(tokenizer: Tokenizer) -> LLTokenizer:
    return LLTokenizer(_TokenizerView(tokenizer), n_vocab=tokenizer.vocab_size, eos_token=sorted(tokenizer.eos_ids))


def _reason(error: str) -> str:
    """What llguidance complains of, in one line of bounded length: it may quote the caller's own names."""
    return " ".join(error.split())[:MAX_REASON_LENGTH] or "it is not valid"
