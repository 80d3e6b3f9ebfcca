"""The policy stays cheap. A ratio to plain dictionary look-ups, so that the machine's speed and load cancel out."""

from __future__ import annotations

import timeit

from benchmarks.policy_cost import policy_us

LOOKUPS = 6000
"""About three times what a round took when this was written."""


def test_a_round_of_the_policy_costs_no_more_than_some_thousand_lookups() -> None:
    def ratio() -> float:
        lookups_us = timeit.timeit("known[key]", "known, key = {(1, 2): 3}, (1, 2)", number=200_000) / 0.2
        return policy_us(300) / lookups_us

    assert min(ratio() for _ in range(5)) < LOOKUPS
