"""From a session's rounds to an answer: text and log probabilities, cut where it ends."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from edge_agent.piece import LoggedToken, Piece
from edge_agent.report import Tally
from edge_agent.round import FinishReason, Round, TokenEvent
from shared.detokenizer import IncrementalDetokenizer
from shared.tokenizer import Tokenizer


class Rounds(Protocol):
    """What an answer asks of a session."""

    def run(self) -> AsyncGenerator[Round, None]:
        """The rounds, until the answer ends; closing the iterator rolls back."""


class Answer:
    """One answer in the making. Iterate `pieces` once, then read `tally`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_length: int,
        *,
        stop: Sequence[str] = (),
        continues: bool = False,
        arrived: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """arrived: when the request came, by `clock`. continues: the text goes on from a prompt's text."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, stop, continues=continues)
        self._unlogged: list[TokenEvent] = []
        self._num_logged = 0
        self._clock = clock
        self.tally = Tally(prompt_length, clock() if arrived is None else arrived)

    async def pieces(self, session: Rounds) -> AsyncGenerator[Piece, None]:
        """The answer, round by round. A stop string ends it, and the session with it."""
        finished = False
        async with aclosing(session.run()) as rounds:
            while not finished:
                started = self._clock()
                round = await anext(rounds)
                now = self._clock()
                piece = self._piece(round, now - started)
                self.tally.add(piece, now)
                finished = piece.finish_reason is not None
                yield piece

    def _piece(self, round: Round, wait_s: float) -> Piece:
        text: list[str] = []
        counted: list[TokenEvent] = []
        finish_reason = round.finish_reason
        for event in round.tokens:
            text.append(self._detokenizer.push(event.token))
            counted.append(event)
            if self._detokenizer.stopped:
                finish_reason = FinishReason.STOP
                break
        if finish_reason is not None:
            text.append(self._detokenizer.flush())
            if self._detokenizer.stopped:
                finish_reason = FinishReason.STOP
        self._unlogged.extend(counted)
        return Piece("".join(text), round, tuple(counted), self._logged(), finish_reason, wait_s)

    def _logged(self) -> tuple[LoggedToken, ...]:
        """The tokens whose text has been let out since the last call."""
        count = self._detokenizer.num_returned_tokens - self._num_logged
        self._num_logged += count
        released, self._unlogged = self._unlogged[:count], self._unlogged[count:]
        return tuple(LoggedToken(event.token, event.logprobs) for event in released if event.logprobs is not None)
