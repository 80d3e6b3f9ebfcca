"""One request's life after validation: admitted, given a session, answered, counted, logged."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from edge_agent.agent import Agent
from edge_agent.answer import Answer
from edge_agent.http_errors import CloudFailedError
from edge_agent.metrics import Outcome, observe
from edge_agent.piece import Piece
from edge_agent.report import Tally
from edge_agent.request import GenerationRequest
from edge_agent.session import Session
from shared.errors import CloudError

logger = logging.getLogger(__name__)


class Completion:
    """Holds a place and a session for as long as it is open."""

    def __init__(
        self,
        agent: Agent,
        request: GenerationRequest,
        *,
        arrived: float,
        stop: Sequence[str] = (),
        continues: bool = False,
    ) -> None:
        self._agent = agent
        self._request = request
        self._arrived = arrived
        self._answer = Answer(
            agent.engine.tokenizer,
            len(request.prompt),
            stop=stop,
            continues=continues,
            arrived=arrived,
            clock=agent.clock,
        )
        self._outcome = Outcome.CANCELLED
        self._opened = False

    @property
    def tally(self) -> Tally:
        """The counts so far."""
        return self._answer.tally

    @asynccontextmanager
    async def open(self) -> AsyncIterator[AsyncGenerator[Piece, None]]:
        """Wait for a place, then yield the answer's pieces; leaving early gives everything back.

        Raises:
            OverloadedError, RateLimitedError: there was no place.
            EngineError, CloudFailedError: while the pieces are iterated.
        """
        try:
            async with self._agent.scheduler.admit(self._request.tenant) as admission:
                observe(self._agent.metrics.queue_time, admission.queue_s)
                async with (
                    self._agent.engine.session(self._request) as session,
                    aclosing(self._pieces(session)) as pieces,
                ):
                    self._opened = True
                    yield pieces
        except CloudError as error:
            self._outcome = Outcome.ERROR
            raise CloudFailedError("the cloud can't serve this request, and it forbids the device") from error
        except Exception:
            self._outcome = Outcome.ERROR if self._opened else Outcome.REFUSED
            raise
        finally:
            self._record()

    async def _pieces(self, session: Session) -> AsyncGenerator[Piece, None]:
        previous = None
        async with aclosing(self._answer.pieces(session)) as pieces:
            async for piece in pieces:
                self.tally.energy, self.tally.energy_source = (
                    session.controller.energy,
                    session.controller.energy_source,
                )
                self._agent.metrics.count_round(piece, previous)
                self._agent.fleet.count(self._request, piece)
                previous = piece.round.decision
                if piece.finish_reason is not None:
                    self._outcome = Outcome(piece.finish_reason.value)
                yield piece
                if piece.finish_reason is None:
                    self._agent.scheduler.raise_if_grace_over()

    def _record(self) -> None:
        latency_s = self._agent.clock() - self._arrived
        if self.tally.energy_source is not None:
            self._agent.metrics.count_energy(self.tally.energy, self.tally.energy_source)
        self._agent.metrics.count_request(self.tally, self._outcome, latency_s)
        decision = self.tally.last_decision
        logger.info(
            "request=%s outcome=%s prompt_tokens=%d completion_tokens=%d mode=%s reason=%s seconds=%.3f",
            self._request.request_id,
            self._outcome,
            len(self._request.prompt),
            self.tally.num_tokens,
            decision.mode if decision else "-",
            decision.reason if decision else "-",
            latency_s,
        )
