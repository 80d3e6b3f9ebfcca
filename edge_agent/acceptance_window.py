"""How likely a draft token is accepted, learnt from verified drafts.

Acceptance depends on who drafted (an n-gram, a model), on how sure it was (match length, probability), and on the
position in the draft: given that the tokens before it were right, a later one is likelier right. So a drafter has one
cell for each (confidence, position), and its estimate shrinks towards what is known on a wider scale while it has few
samples:

    drafter's own confidence -> all drafts of this process -> drafts of this request

Rounds that verified no draft are no samples. Old samples fade, so that a text that changes is noticed.
"""

from __future__ import annotations

from collections import defaultdict
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

Cell = int
"""A step of confidence and a position, in one number."""

JudgedToken = tuple[Cell, float, bool]
"""Where it is counted, the drafter's confidence, whether it was accepted."""


def cell(confidence: float, position: int) -> Cell:
    """Where a draft token is counted, among its drafter's."""
    step = int(confidence * CONFIDENCE_STEPS)
    return step * (LAST_POSITION + 1) + (position if position < LAST_POSITION else LAST_POSITION)


def confidences(draft: Draft) -> Sequence[float]:
    """The drafter's own probability of each token, in [0, 1]."""
    known = draft.confidences
    return known if len(known) == len(draft.tokens) else (DEFAULT_CONFIDENCE,) * len(draft.tokens)


@dataclass(slots=True)
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


@dataclass(slots=True)
class DrafterStats:
    """What one scope has seen of one drafter: its tokens, all together and by cell, and what asking it was worth."""

    tokens: Tally = field(default_factory=Tally)
    cells: defaultdict[Cell, Tally] = field(default_factory=lambda: defaultdict(Tally))
    gains: Tally = field(default_factory=Tally)


@dataclass
class AcceptanceStats:
    """What one scope (the process, a request) has seen. half_life: in samples of a cell. strength: how many samples it
    takes to outweigh the prior. keep: how much of the older samples is left after a newer one."""

    half_life: float
    strength: float
    drafters: defaultdict[str, DrafterStats] = field(default_factory=lambda: defaultdict(DrafterStats))
    keep: float = field(init=False)

    def __post_init__(self) -> None:
        self.keep = 0.5 ** (1.0 / self.half_life)

    def add(self, drafter: str, judged: Sequence[JudgedToken]) -> None:
        """The judged tokens of a verified draft."""
        stats, keep = self.drafters[drafter], self.keep
        for place, _, stood in judged:
            stats.cells[place].add(stood, keep)
            stats.tokens.add(stood, keep)

    def asked(self, drafter: str, gain: float) -> None:
        """A drafter was asked, and what it drafted was worth this much."""
        self.drafters[drafter].gains.add(gain, self.keep)

    def promise(self, drafter: str, prior: float) -> float:
        """What asking this drafter is worth on average."""
        return self.drafters[drafter].gains.rate(prior, self.strength)


def judged_tokens(draft: Draft, accepted: int) -> list[JudgedToken]:
    """Those of a verified draft whose first `accepted` tokens stood. What comes after the first rejection tells
    nothing."""
    claims = confidences(draft)[: accepted + 1]
    return [(cell(claim, position), claim, position < accepted) for position, claim in enumerate(claims)]


class AcceptancePrior:
    """What all requests of this process have shown: slow, and where every request starts from."""

    def __init__(self, half_life: float = 300.0, strength: float = 12.0, trust: float = 20.0) -> None:
        """strength, trust: how many samples it takes to outweigh a cell's, and a drafter's, own confidence."""
        self.stats = AcceptanceStats(half_life, strength)
        self._claimed: defaultdict[str, Tally] = defaultdict(Tally)
        self._honesty: dict[str, float] = {}
        self._trust = trust

    def add(self, drafter: str, judged: Sequence[JudgedToken]) -> None:
        """The judged tokens of a verified draft."""
        claimed, keep = self._claimed[drafter], self.stats.keep
        for _, claim, _ in judged:
            claimed.add(claim, keep)
        self.stats.add(drafter, judged)
        accepted, half = self.stats.drafters[drafter].tokens.accepted, self._trust / 2
        self._honesty[drafter] = min(1.0, (half + accepted) / (half + claimed.accepted))

    def asked(self, drafter: str, gain: float) -> None:
        """See `AcceptanceStats.asked`."""
        self.stats.asked(drafter, gain)

    def promise(self, drafter: str, unseen: float) -> float:
        """What asking this drafter gains. unseen: what to assume while nothing was shown."""
        return self.stats.promise(drafter, unseen)

    def honesty(self, drafter: str) -> float:
        """Accepted over claimed, at most 1: a drafter that boasts in one cell is believed less in all of them."""
        return self._honesty.get(drafter, 1.0)


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
        self.num_drafted += len(draft.tokens)
        self.num_accepted += accepted
        judged = judged_tokens(draft, accepted)
        self._stats.add(draft.drafter, judged)
        self._prior.add(draft.drafter, judged)

    def rates(self, draft: Draft) -> list[float]:
        """See `each_rate`."""
        return list(self.each_rate(draft))

    def each_rate(self, draft: Draft) -> Iterator[float]:
        """For each token the chance that it is accepted, given those before it.

        A position that was rarely reached is believed nearly as far beyond, or short of, its claim as the one before
        it, or drafts that were cut short while they were bad would stay short for ever.
        """
        drafter = draft.drafter
        everyone, own = self._prior.stats.drafters[drafter].cells, self._stats.drafters[drafter].cells
        strength, own_strength = self._prior.stats.strength, self._stats.strength
        belief = honesty = self._prior.honesty(drafter)
        for position, claimed in enumerate(confidences(draft)):
            place = cell(claimed, position)
            rate = claimed * belief
            if rate > 1.0:
                rate = 1.0
            if place in everyone:
                rate = everyone[place].rate(rate, strength)
            if place in own:
                rate = own[place].rate(rate, own_strength)
            yield rate
            carried = CARRIED_ON * rate / claimed if claimed > LEAST_CLAIM else 0.0
            belief = carried if carried > honesty else honesty

    def asked(self, drafter: str, gain: float) -> None:
        """A drafter was asked, and its draft was worth `gain` direct rounds, its cost paid."""
        self._stats.asked(drafter, gain)
        self._prior.stats.asked(drafter, gain)

    def promise(self, drafter: str, unseen: float = 0.0) -> float:
        """What asking this drafter is expected to gain, by this request and by all before it.

        unseen: what to assume while neither has shown much.
        """
        return self._stats.promise(drafter, self._prior.stats.promise(drafter, unseen))

    def typical_rates(self, drafter: str, gamma: int, expected: float) -> list[float]:
        """The same before a draft is there: by position, over all confidences. expected: the drafter's prior rate."""
        prior = expected * self._prior.honesty(drafter)
        return [self._stats.drafters[drafter].tokens.rate(prior, self._stats.strength)] * gamma

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over verified draft tokens of this request; None while none was verified."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None
