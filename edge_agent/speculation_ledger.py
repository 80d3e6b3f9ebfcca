"""What drafting may lose: an account for each drafter, in direct rounds.

Speculation must never make an answer slower, and estimates alone can't promise that. So each drafter has an account of
its own, and one that is bad costs no other its chances. What a verified draft saved flows in, what it lost flows out,
and a small share of all decoding time flows in for trying things out. No draft is verified that could lose more than
its drafter's account holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

STOCK = 1.0
"""Direct rounds that an account begins with."""

MOST = 4.0
"""Direct rounds that an account holds at most: what was earned long ago is no leave to lose it all now."""

MOST_PATIENCE = 4
"""A trial that fails makes the next one wait longer, up to this many times as long."""


@dataclass(slots=True)
class Purse:
    """Direct rounds that may be lost. May fall below zero; then nothing is risked until it has filled again."""

    credit: float

    def put(self, gain: float) -> None:
        """A gain, or a loss if negative."""
        credit = self.credit + gain
        self.credit = credit if credit < MOST else MOST


@dataclass(slots=True)
class Account:
    """One drafter's.

    rounds: what its next draft may lose. starts: what may be spent on catching up before it has drafted at all: it pays
    for every catch-up and holds no more than its drafts have earned since.
    """

    rounds: Purse
    starts: Purse
    _wait: int = 0
    _patience: int = 1

    def settle(self, gain: float) -> None:
        """One of its drafts saved (or, negative, lost) this much."""
        self.rounds.put(gain)
        self.starts.put(gain)

    @property
    def may_try(self) -> bool:
        """Whether it is time to try what doesn't promise to pay."""
        return self._wait <= 0

    def tried(self, every: int) -> None:
        """A trial was made. The next one waits `every` rounds, and longer after each that showed nothing."""
        self._wait = every * self._patience
        self._patience = min(self._patience * 2, MOST_PATIENCE)

    def paid(self) -> None:
        """A draft was worth verifying without being a trial."""
        self._patience = 1

    def wait(self) -> None:
        """A round has passed."""
        self._wait -= 1


class SpeculationLedger:
    """The accounts of all drafters; one ledger a process."""

    def __init__(self, drafters: Sequence[str]) -> None:
        self.accounts = {name: Account(Purse(STOCK), Purse(STOCK)) for name in drafters}

    def accrue(self, gain: float) -> None:
        """A round has passed: this much may be spent on trying, by those that have less than they began with.

        Only where there are none it goes to those that aren't full: one that nobody asks must not hoard what another
        needs.
        """
        accounts = self.accounts.values()
        for account in accounts:
            account.wait()
        needy = [account for account in accounts if account.rounds.credit < STOCK]
        needy = needy or [account for account in accounts if account.rounds.credit < MOST]
        for account in needy:
            account.settle(gain / len(needy))
