"""What a round costs: the measured curve c(m) of a target pass over m positions, and what a draft costs.

Two things move while serving. The *level* moves quickly: the clock throttles, the context grows, another process takes
a core; all m move alike, so the level is the median of the last few ratios of measured to expected time. The *shape*
c(m)/c(1) moves slowly, if at all, and one late round must not bend it: each sample moves it by a few percent at most.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import sub

LEVEL_WINDOW = 9
SHAPE_WEIGHT = 0.03
SHAPE_CLIP = 0.25
DRAFT_WINDOW = 15


@dataclass(frozen=True)
class CostCurve:
    """Cost of a target pass over m = 1, 2, … positions; past the end it goes on with the last slope. Any unit."""

    values: tuple[float, ...]
    least_step: float = field(init=False, compare=False)
    """No position costs less than this more than the one before it."""

    def __post_init__(self) -> None:
        if not self.values or not (min(self.values) > 0 and math.isfinite(sum(self.values))):
            raise ValueError(f"a cost curve needs positive finite values, got {self.values}")
        object.__setattr__(self, "least_step", min(map(sub, self.values[1:], self.values), default=0.0))

    def at(self, positions: int) -> float:
        """c(positions), positions >= 1."""
        if positions <= len(self.values):
            return self.values[positions - 1]
        slope = self.values[-1] - self.values[-2] if len(self.values) > 1 else self.values[-1]
        return self.values[-1] + max(slope, 0.0) * (positions - len(self.values))

    def extra(self, gamma: int) -> float:
        """What verifying gamma draft tokens adds to a direct round."""
        return self.at(gamma + 1) - self.at(1)


class CostModel:
    """The curve of one target, kept current. Seconds (or joules: the unit is the caller's)."""

    def __init__(self, curve: Sequence[float], draft_costs: Mapping[str, float] | None = None) -> None:
        """curve: c(1), c(2), … from calibration. draft_costs: cost of one draft token, by drafter; others are free."""
        base = CostCurve(tuple(curve))
        self._shape = [value / base.values[0] for value in _rising(base.values)]
        self._scale = base.values[0]
        self._levels: deque[float] = deque(maxlen=LEVEL_WINDOW)
        self._drafts = {name: _DraftCost(cost) for name, cost in (draft_costs or {}).items()}
        self._relative = CostCurve(tuple(_rising(self._shape)))
        self._level = self._scale

    @property
    def curve(self) -> CostCurve:
        """c(m) as it is now."""
        return CostCurve(tuple([self._level * share for share in self._relative.values]))

    @property
    def num_positions(self) -> int:
        """The m that the curve reaches to."""
        return len(self._shape)

    def at(self, positions: int) -> float:
        """c(positions) as it is now."""
        return self._level * self._relative.at(positions)

    @property
    def relative(self) -> CostCurve:
        """The same in direct rounds: c(m) / c(1)."""
        return self._relative

    @property
    def direct(self) -> float:
        """c(1): a token without speculation."""
        return self._level

    @property
    def calibrated_direct(self) -> float:
        """c(1) as calibrated, before the clock was throttled or the context grew."""
        return self._scale

    def draft_cost(self, drafter: str) -> float:
        """Cost of one token of this drafter; 0 for one that was never seen."""
        cost = self._drafts.get(drafter)
        return cost.value if cost else 0.0

    @property
    def draft_costs(self) -> dict[str, float]:
        """Cost of a token by drafter."""
        return {name: cost.value for name, cost in self._drafts.items()}

    def observe_verify(self, positions: int, cost: float) -> None:
        """A pass over `positions` cost this much. Nonsense is passed over."""
        if not 0 < cost < math.inf or not 1 <= positions <= len(self._shape):
            return
        expected = self.at(positions)
        self._levels.append(cost / self._shape[positions - 1])
        if positions > 1 and len(self._levels) == LEVEL_WINDOW:
            error = min(max(cost / expected - 1, -SHAPE_CLIP), SHAPE_CLIP)
            self._shape[positions - 1] *= 1 + SHAPE_WEIGHT * error
            self._relative = CostCurve(tuple(_rising(self._shape)))
        # Until the window has half filled, calibration is the better witness than a round or two.
        if len(self._levels) > LEVEL_WINDOW // 2:
            self._level = _median(self._levels)

    def observe_draft(self, drafter: str, tokens: int, cost: float) -> None:
        """A draft of `tokens` cost this much."""
        if tokens > 0 and 0 <= cost < math.inf:
            self._drafts.setdefault(drafter, _DraftCost(cost / tokens)).add(cost / tokens)


@dataclass
class _DraftCost:
    prior: float
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=DRAFT_WINDOW))
    value: float = 0.0

    def __post_init__(self) -> None:
        self.value = self.prior

    def add(self, cost: float) -> None:
        self.samples.append(cost)
        if len(self.samples) > DRAFT_WINDOW // 2:
            self.value = _median(self.samples)


def _rising(values: Sequence[float]) -> list[float]:
    """Never falling: more positions cost no less."""
    rising, highest = [], 0.0
    for value in values:
        highest = value if value > highest else highest
        rising.append(highest)
    return rising


def _median(values: Collection[float]) -> float:
    """The middle one, the upper of two: several times as quick as the library's, and asked for every round."""
    return sorted(values)[len(values) // 2]
