"""One simulated replica: the service's own rules (places, slots, batches, linger, hint) around passes of known cost."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from cloud_service.batcher import linger_s
from cloud_service.capacity.agenda import Agenda
from cloud_service.capacity.plan import Costs, Limits
from cloud_service.load import LoadMeter
from cloud_service.target import PREFILL_CHUNK

Then = Callable[[], None]


class Worker:
    """The inference thread: one job after the other."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._jobs: deque[tuple[float, Then, Then]] = deque()
        self._is_busy = False
        self.busy_ms = 0.0

    def run(self, cost_ms: float, then: Then, begun: Then = lambda: None) -> None:
        """Do a job when those before it are done."""
        self._jobs.append((cost_ms, then, begun))
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        self._is_busy = bool(self._jobs)
        if not self._jobs:
            return
        cost_ms, then, begun = self._jobs.popleft()
        begun()
        self.busy_ms += cost_ms

        def done() -> None:
            # What the job's owner asks for next stands behind those that wait already.
            then()
            self._next()

        self._agenda.after(cost_ms, done)


class Places:
    """Admission: some run, some wait, the next is sent away."""

    def __init__(self, max_running: int, max_waiting: int, meter: LoadMeter, agenda: Agenda) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._meter = meter
        self._agenda = agenda
        self._num_running = 0
        self._waiting: deque[tuple[float, Then]] = deque()

    def take(self, then: Then) -> bool:
        """Go on with a place, now or later; False where not even a place to wait is left."""
        if self._num_running >= self._max_running and len(self._waiting) >= self._max_waiting:
            return False
        self._waiting.append((self._agenda.now, then))
        self._meter.waiting += 1
        self._admit()
        return True

    def give_back(self) -> None:
        """A place is free."""
        self._num_running -= 1
        self._meter.running -= 1
        self._admit()

    def _admit(self) -> None:
        if self._waiting and self._num_running < self._max_running:
            asked_at, then = self._waiting.popleft()
            self._num_running += 1
            self._meter.waiting -= 1
            self._meter.running += 1
            self._meter.queued(self._agenda.now - asked_at)
            then()


class Slots:
    """Caches: how much of each session is held. The least recently used free one goes first."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free: OrderedDict[Hashable, int] = OrderedDict()
        self._num_taken = 0

    def acquire(self, session: Hashable) -> int:
        """Tokens of the session that are held already."""
        held = self._free.pop(session, 0)
        self._num_taken += 1
        while len(self._free) + self._num_taken > self._num_slots:
            self._free.popitem(last=False)
        return held

    def release(self, session: Hashable, tokens: int) -> None:
        """Give it back with so many tokens."""
        self._num_taken -= 1
        self._free[session] = tokens


@dataclass(eq=False)
class Session:
    """An answer as the replica knows it. tokens: prompt and answer so far."""

    tokens: int
    replied_at: float | None = None


@dataclass(frozen=True)
class Step:
    """What waits for a pass: so many rows, since then. comes_again: a stream's."""

    rows: int
    comes_again: bool
    asked_at: float
    then: Then


@dataclass
class Counts:
    """What a replica did."""

    rounds: int = 0
    batches: int = 0
    batched_steps: int = 0
    rebuilt_tokens: int = 0
    gammas: int = 0


class Replica:
    """Serves rounds of verification and streams of tokens. The hint is the service's own."""

    def __init__(self, agenda: Agenda, costs: Costs, limits: Limits) -> None:
        num_slots = max(2, limits.num_slots)
        self._max_batch = min(limits.max_running, num_slots // 2)
        self._agenda = agenda
        self._costs = costs
        self.worker = Worker(agenda)
        self.meter = LoadMeter(costs.passes, limits.max_gamma)
        self.counts = Counts()
        self.num_sessions = 0
        self._slots = Slots(num_slots)
        self._round_places = Places(self._max_batch, limits.max_waiting, self.meter, agenda)
        self._stream_places = Places(self._max_batch, limits.max_waiting, self.meter, agenda)
        self._steps: list[Step] = []
        self._expected = 1
        self._last_pass_ms = 0.0
        self._batcher_is_idle = True
        self._linger_end: object | None = None

    @property
    def hint(self) -> int:
        """The gamma of the next reply."""
        return self.meter.load(self.num_sessions).gamma_hint

    def verify(self, session: Session, gamma: int, accepted: int, then: Then) -> bool:
        """One round; False where it is sent away. Afterwards the session holds what was accepted and one token more."""
        if session.replied_at is not None:
            self.meter.rested(self._agenda.now - session.replied_at)

        def with_place() -> None:
            held = self._slots.acquire(session)
            self._take_in(session.tokens - min(held, session.tokens - 1), judge)

        def judge(rest: int) -> None:
            self._step(rest + gamma, replied)

        def replied() -> None:
            self._slots.release(session, session.tokens + accepted)
            session.tokens += accepted + 1
            session.replied_at = self._agenda.now
            self.meter.judged(gamma, accepted)
            self.counts.rounds += 1
            self.counts.gammas += gamma
            self._round_places.give_back()
            self._agenda.after(self._costs.message_ms, then)

        return self._round_places.take(with_place)

    def generate(self, session: Session, num_tokens: int, each: Then, then: Then) -> bool:
        """A stream of tokens; False where it is sent away."""
        left = num_tokens

        def with_place() -> None:
            self.meter.streams += 1
            held = self._slots.acquire(session)
            self._take_in(session.tokens - min(held, session.tokens - 1), first)

        def first(rest: int) -> None:
            self._step(rest, made, comes_again=True)

        def made() -> None:
            nonlocal left
            left -= 1
            session.tokens += 1
            each()
            if left:
                self._agenda.after(self._costs.message_ms, lambda: self._step(1, made, comes_again=True))
                return
            self.meter.streams -= 1
            self._slots.release(session, session.tokens - 1)
            self._stream_places.give_back()
            self._agenda.after(self._costs.message_ms, then)

        return self._stream_places.take(with_place)

    def _take_in(self, tokens: int, then: Callable[[int], None]) -> None:
        """Feed what isn't held, chunk by chunk; the rest of it goes with the judging pass."""
        if tokens <= PREFILL_CHUNK:
            then(tokens)
            return
        self.counts.rebuilt_tokens += PREFILL_CHUNK
        cost_ms = self._costs.prefill(PREFILL_CHUNK)
        self.worker.run(cost_ms, lambda: self._take_in(tokens - PREFILL_CHUNK, then))

    def _step(self, rows: int, then: Then, *, comes_again: bool = False) -> None:
        self._steps.append(Step(rows, comes_again, self._agenda.now, then))
        # The service's batcher is woken after all that happens at this instant.
        if self._batcher_is_idle:
            self._batcher_is_idle = False
            self._agenda.after(0.0, self._linger)
        elif self._linger_end is not None:
            self._agenda.after(0.0, self._serve_if_complete)

    def _linger(self) -> None:
        if len(self._steps) >= min(self._expected, self._max_batch):
            self._serve()
            return
        end = self._linger_end = object()
        wait_ms = linger_s(self._last_pass_ms / 1e3) * 1e3
        self._agenda.after(wait_ms, lambda: self._serve() if self._linger_end is end else None)

    def _serve_if_complete(self) -> None:
        if self._linger_end is not None and len(self._steps) >= min(self._expected, self._max_batch):
            self._serve()

    def _serve(self) -> None:
        self._linger_end = None
        size = self._costs.passes.num_together([step.rows for step in self._steps[: self._max_batch]])
        steps, self._steps = self._steps[:size], self._steps[size:]
        rows = sum(step.rows for step in steps)
        cost_ms = self._last_pass_ms = self._costs.batch(rows) if size > 1 else self._costs.verify(rows)

        def begun() -> None:
            self.meter.queued(sum(self._agenda.now - step.asked_at for step in steps) / size)

        def done() -> None:
            self.counts.batches += 1
            self.counts.batched_steps += len(steps)
            self._expected = len(self._steps) + sum(step.comes_again for step in steps)
            for step in steps:
                step.then()
            self._batcher_is_idle = not self._steps
            if self._steps:
                self._linger()

        self.worker.run(cost_ms, done, begun)
