"""How likely a draft token is accepted, learnt from verified drafts.

Acceptance depends on who drafted (an n-gram, a model), on how sure it was (match length, probability), and on the
position in the draft: given that the tokens before it were right, a later one is likelier right. So there is one cell
for each (drafter, confidence, position), and its estimate shrinks towards what is known on a wider scale while it has
few samples:

    drafter's own confidence -> all drafts of this process -> drafts of this request

Rounds that verified no draft are no samples. Old samples fade, so that a text that changes is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shared.acceptance import Draft

DEFAULT_CONFIDENCE = 0.5
CONFIDENCE_STEPS = 20
LAST_POSITION = 4
"""Positions from here on share a cell."""

CARRIED_ON = 0.9
"""How much of one position's rate over its claim the next is believed to have before it was judged."""

LEAST_CLAIM = 0.05
"""Of less than this nothing is carried on."""

Cell = tuple[str, int, int]


def cell(drafter: str, confidence: float, position: int) -> Cell:
    """Where a draft token is counted."""
    return drafter, int(confidence * CONFIDENCE_STEPS), min(position, LAST_POSITION)


def confidences(draft: Draft) -> Sequence[float]:
    """The drafter's own probability of each token, in [0, 1]."""
    known = draft.confidences
    return known if len(known) == len(draft) else (DEFAULT_CONFIDENCE,) * len(draft)


@dataclass
class Tally:
    """Fading counts of tokens judged and accepted; or of anything, and the sum of its values."""

    judged: float = 0.0
    accepted: float = 0.0

    def add(self, accepted: float, keep: float) -> None:
        """One more; the older ones fade by `keep`."""
        self.judged = self.judged * keep + 1.0
        self.accepted = self.accepted * keep + accepted

    def rate(self, prior: float, strength: float) -> float:
        """The accepted share, as if `strength` tokens had been judged at the `prior` rate before."""
        return (prior * strength + self.accepted) / (strength + self.judged)


@dataclass
class AcceptanceStats:
    """What one scope (the process, a request) has seen. half_life: in samples of a cell. strength: how many samples it
    takes to outweigh the prior. keep: how much of the older samples is left after a newer one."""

    half_life: float
    strength: float
    cells: dict[Cell, Tally] = field(default_factory=dict)
    drafters: dict[str, Tally] = field(default_factory=dict)
    gains: dict[str, Tally] = field(default_factory=dict)
    keep: float = field(init=False)

    def __post_init__(self) -> None:
        self.keep = 0.5 ** (1.0 / self.half_life)

    def add(self, draft: Draft, accepted: int) -> None:
        """A verified draft whose first `accepted` tokens stood. What comes after the first rejection tells nothing."""
        claims = confidences(draft)
        drafter = self.drafters.setdefault(draft.drafter, Tally())
        for position, stood in judged(draft, accepted):
            place = cell(draft.drafter, claims[position], position)
            self.cells.setdefault(place, Tally()).add(stood, self.keep)
            drafter.add(stood, self.keep)

    def asked(self, drafter: str, gain: float) -> None:
        """A drafter was asked, and what it drafted was worth this much."""
        self.gains.setdefault(drafter, Tally()).add(gain, self.keep)

    def promise(self, drafter: str, prior: float) -> float:
        """What asking this drafter is worth on average."""
        tally = self.gains.get(drafter)
        return tally.rate(prior, self.strength) if tally else prior

    def rate(self, cell: Cell, prior: float) -> float:
        """Chance that a token of this cell is accepted, given that those before it were."""
        tally = self.cells.get(cell)
        return tally.rate(prior, self.strength) if tally else prior


def judged(draft: Draft, accepted: int) -> Iterator[tuple[int, bool]]:
    """(position, whether it was accepted) of the tokens that the target really judged."""
    for position in range(min(accepted + 1, len(draft))):
        yield position, position < accepted


class AcceptancePrior:
    """What all requests of this process have shown: slow, and where every request starts from."""

    def __init__(self, half_life: float = 300.0, strength: float = 12.0, trust: float = 20.0) -> None:
        """strength, trust: how many samples it takes to outweigh a cell's, and a drafter's, own confidence."""
        self._stats = AcceptanceStats(half_life, strength)
        self._claimed: dict[str, Tally] = {}
        self._trust = trust

    def add(self, draft: Draft, accepted: int) -> None:
        """A verified draft."""
        claim, claims = self._claimed.setdefault(draft.drafter, Tally()), confidences(draft)
        for position, _ in judged(draft, accepted):
            claim.add(claims[position], self._stats.keep)
        self._stats.add(draft, accepted)

    def asked(self, drafter: str, gain: float) -> None:
        """See `AcceptanceStats.asked`."""
        self._stats.asked(drafter, gain)

    def promise(self, drafter: str, unseen: float) -> float:
        """What asking this drafter gains. unseen: what to assume while nothing was shown."""
        return self._stats.promise(drafter, unseen)

    def rate(self, cell: Cell, unseen: float) -> float:
        """Chance of a token of this cell. unseen: what to assume of a cell that was never judged."""
        return self._stats.rate(cell, unseen)

    def honesty(self, drafter: str) -> float:
        """Accepted over claimed, at most 1: a drafter that boasts in one cell is believed less in all of them."""
        tally, claim = self._stats.drafters.get(drafter), self._claimed.get(drafter)
        if tally is None or claim is None:
            return 1.0
        return min(1.0, (self._trust / 2 + tally.accepted) / (self._trust / 2 + claim.accepted))


class AcceptanceWindow:
    """One request's view. Starts from the prior, then believes its own text."""

    def __init__(self, prior: AcceptancePrior, half_life: float = 30.0, strength: float = 12.0) -> None:
        self._prior = prior
        self._stats = AcceptanceStats(half_life, strength)
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_verified_drafts = 0

    def add(self, draft: Draft, accepted: int) -> None:
        """A verified draft; an empty one is no sample."""
        if not draft.tokens:
            return
        self.num_verified_drafts += 1
        self.num_drafted += len(draft)
        self.num_accepted += accepted
        self._stats.add(draft, accepted)
        self._prior.add(draft, accepted)

    def rates(self, draft: Draft) -> list[float]:
        """For each token the chance that it is accepted, given those before it.

        A position that was rarely reached is believed nearly as far beyond, or short of, its claim as the one before
        it, or drafts that were cut short while they were bad would stay short for ever.
        """
        rates: list[float] = []
        belief = honesty = self._prior.honesty(draft.drafter)
        for position, claimed in enumerate(confidences(draft)):
            place = cell(draft.drafter, claimed, position)
            unseen = claimed * belief
            rate = self._stats.rate(place, self._prior.rate(place, unseen if unseen < 1.0 else 1.0))
            rates.append(rate)
            carried = CARRIED_ON * rate / claimed if claimed > LEAST_CLAIM else 0.0
            belief = carried if carried > honesty else honesty
        return rates

    def asked(self, drafter: str, gain: float) -> None:
        """A drafter was asked, and its draft was worth `gain` direct rounds, its cost paid."""
        self._stats.asked(drafter, gain)
        self._prior.asked(drafter, gain)

    def promise(self, drafter: str, unseen: float = 0.0) -> float:
        """What asking this drafter is expected to gain, by this request and by all before it.

        unseen: what to assume while neither has shown much.
        """
        return self._stats.promise(drafter, self._prior.promise(drafter, unseen))

    def typical_rates(self, drafter: str, gamma: int, expected: float) -> list[float]:
        """The same before a draft is there: by position, over all confidences. expected: the drafter's prior rate."""
        prior = expected * self._prior.honesty(drafter)
        tally = self._stats.drafters.get(drafter)
        return [tally.rate(prior, self._stats.strength) if tally else prior] * gamma

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over verified draft tokens of this request; None while none was verified."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None
