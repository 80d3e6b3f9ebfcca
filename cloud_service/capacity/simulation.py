"""Edges that ask, pause and ask again, against replicas: what they get to feel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import mean

from cloud_service.capacity.agenda import Agenda
from cloud_service.capacity.plan import Costs, Edges, Limits
from cloud_service.capacity.replica import Replica, Session

WARM_UP = 0.2
"""Share of the time whose answers don't count: at first everyone is resting."""
RETRY_AFTER_MS = 1000.0
"""What the service asks of those it sends away; the device goes on alone for longer."""


@dataclass(frozen=True)
class Answer:
    """One that has ended. Milliseconds."""

    tokens: int
    first_token_ms: float
    total_ms: float

    @property
    def token_ms(self) -> float | None:
        """Of a token after the first; None where there is no other."""
        return (self.total_ms - self.first_token_ms) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass
class Tally:
    """What became of the answers. handed_back: those that the device had to go on with alone."""

    started: int = 0
    handed_back: int = 0
    finished: int = 0
    tokens: int = 0
    answers: list[Answer] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """A simulation's result. Percentiles over the answers that ended after the warm-up; NaN where none did."""

    edges: int
    seconds: float
    started: int
    finished: int
    handed_back: int
    unfinished: int
    tokens_per_second: float
    token_p50_ms: float
    token_p95_ms: float
    first_token_p95_ms: float
    answer_mean_s: float
    answer_p95_s: float
    busy: float
    mean_batch: float
    mean_gamma: float

    @property
    def handed_back_share(self) -> float:
        """Of all answers that were begun."""
        return self.handed_back / self.started if self.started else 0.0


class Edge:
    """One device: it asks, gets its answer, rests, and asks again."""

    def __init__(self, agenda: Agenda, edges: Edges, replicas: Sequence[Replica], tally: Tally, random: Random) -> None:
        self._agenda = agenda
        self._edges = edges
        self._replicas = replicas
        self._tally = tally
        self._random = random

    def rest(self) -> None:
        """Until the next question."""
        pause_s = self._edges.pause_s
        self._agenda.after(self._random.expovariate(1.0 / pause_s) * 1e3 if pause_s else 0.0, self._ask)

    def _ask(self) -> None:
        edges, random = self._edges, self._random
        self._tally.started += 1
        # A session stays where its first message went; balancers hash its id.
        self._replica = self._replicas[random.randrange(len(self._replicas))]
        self._session = Session(edges.length(edges.prompt_tokens, random))
        self._left = self._length = edges.length(edges.answer_tokens, random)
        self._asked_at = self._agenda.now
        self._first_at = math.nan
        if edges.gamma == 0:
            self._agenda.after(edges.link_ms(random), self._generate)
            return
        self._replica.num_sessions += 1
        self._draft(self._replica.meter.max_gamma)

    def _draft(self, hint: int) -> None:
        gamma = min(hint if self._edges.gamma is None else self._edges.gamma, self._left - 1)
        self._agenda.after(
            gamma * self._edges.draft_ms + self._edges.link_ms(self._random), lambda: self._verify(gamma)
        )

    def _verify(self, gamma: int) -> None:
        accepted = self._edges.accepted(gamma, self._random)

        def replied() -> None:
            hint = self._replica.hint
            self._agenda.after(self._edges.link_ms(self._random), lambda: self._commit(accepted + 1, hint))

        if not self._replica.verify(self._session, gamma, accepted, replied):
            self._replica.num_sessions -= 1
            self._hand_back()

    def _commit(self, tokens: int, hint: int) -> None:
        self._gain(tokens)
        stays_away = hint == 0 and self._edges.gamma is None
        if self._left and not stays_away:
            self._draft(hint)
            return
        self._replica.num_sessions -= 1
        if self._left:
            self._hand_back()
        else:
            self._finish()

    def _generate(self) -> None:
        def each() -> None:
            self._gain(1)

        def ended() -> None:
            self._agenda.after(self._edges.link_ms(self._random), self._finish)

        if not self._replica.generate(self._session, self._length, each, ended):
            self._hand_back()

    def _gain(self, tokens: int) -> None:
        if math.isnan(self._first_at):
            self._first_at = self._agenda.now
        self._left -= tokens
        self._tally.tokens += tokens

    def _finish(self) -> None:
        self._tally.finished += 1
        total_ms = self._agenda.now - self._asked_at
        self._tally.answers.append(Answer(self._length, self._first_at - self._asked_at, total_ms))
        self.rest()

    def _hand_back(self) -> None:
        self._tally.handed_back += 1
        self._agenda.after(RETRY_AFTER_MS, self.rest)


def simulate(costs: Costs, limits: Limits, edges: Edges, seconds: float = 300.0, seed: int = 0) -> Outcome:
    """So many seconds of all of it. The same seed gives the same numbers."""
    agenda = Agenda()
    replicas = [Replica(agenda, costs, limits) for _ in range(limits.replicas)]
    tally = Tally()
    for number in range(edges.number):
        Edge(agenda, edges, replicas, tally, Random(f"{seed}/{number}")).rest()
    agenda.run(WARM_UP * seconds * 1e3)
    tally.answers.clear()
    tokens, busy_ms = tally.tokens, sum(replica.worker.busy_ms for replica in replicas)
    agenda.run(seconds * 1e3)
    measured_s = (1 - WARM_UP) * seconds
    answer_s = [answer.total_ms / 1e3 for answer in tally.answers]
    token_ms = [answer.token_ms for answer in tally.answers if answer.token_ms is not None]
    rounds = sum(replica.counts.rounds for replica in replicas)
    batches = sum(replica.counts.batches for replica in replicas)
    return Outcome(
        edges=edges.number,
        seconds=seconds,
        started=tally.started,
        finished=tally.finished,
        handed_back=tally.handed_back,
        unfinished=tally.started - tally.finished - tally.handed_back,
        tokens_per_second=(tally.tokens - tokens) / measured_s,
        token_p50_ms=percentile(token_ms, 0.5),
        token_p95_ms=percentile(token_ms, 0.95),
        first_token_p95_ms=percentile([answer.first_token_ms for answer in tally.answers], 0.95),
        answer_mean_s=mean(answer_s) if answer_s else math.nan,
        answer_p95_s=percentile(answer_s, 0.95),
        busy=(sum(replica.worker.busy_ms for replica in replicas) - busy_ms) / (measured_s * 1e3 * limits.replicas),
        mean_batch=sum(replica.counts.batched_steps for replica in replicas) / batches if batches else 0.0,
        mean_gamma=sum(replica.counts.gammas for replica in replicas) / rounds if rounds else 0.0,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value that so large a share doesn't exceed; NaN of none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan
