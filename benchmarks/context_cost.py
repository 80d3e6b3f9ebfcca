"""What a longer context costs: time of a pass after many tokens over that of one after few.

    python -m benchmarks.context_cost --target DIRECTORY [--short 200] [--long 2000] [--rounds 40]

One sequence of each length, a pass of each in turns, over one position (a direct token) and over four (a draft of
three); each is rewound, so that the next starts where it did. Medians. Nothing else should run on the machine
meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from edge_agent.verifier import PREFILL_CHUNK
from shared.causal_lm import CausalLM
from shared.onnx_lm import OnnxModel

POSITIONS = (1, 4)

Times = dict[int, list[float]]
"""Seconds of each pass, by the length of its sequence."""


def filled(model: OnnxModel, length: int) -> CausalLM:
    """A sequence of so many tokens."""
    lm = model.new_cache()
    tokens = [100 + 37 * index % 1900 for index in range(length)]
    for start in range(0, length, PREFILL_CHUNK):
        lm.forward(tokens[start : start + PREFILL_CHUNK], 0)
    return lm


def pass_s(lm: CausalLM, positions: int) -> float:
    """Seconds of a pass, which is undone."""
    length = len(lm.tokens)
    started = time.perf_counter()
    lm.forward([100] * positions, positions)
    seconds = time.perf_counter() - started
    lm.truncate(length)
    return seconds


def measure(target: Path, lengths: tuple[int, int], rounds: int) -> dict[int, Times]:
    """Times by positions."""
    model = OnnxModel(target, context_length=max(lengths) + max(POSITIONS))
    lms = {length: filled(model, length) for length in lengths}
    found: dict[int, Times] = {positions: {length: [] for length in lengths} for positions in POSITIONS}
    for number in range(rounds):
        for positions, times in found.items():
            for length in lengths[:: 1 if number % 2 else -1]:
                times[length].append(pass_s(lms[length], positions))
    return found


def table(found: dict[int, Times], lengths: tuple[int, int]) -> Table:
    """Medians in milliseconds, and their ratio."""
    shown = Table("positions", *(f"after {length}, ms" for length in lengths), "ratio")
    for positions, times in found.items():
        short, long = (statistics.median(times[length]) for length in lengths)
        shown.add_row(str(positions), f"{short * 1e3:.2f}", f"{long * 1e3:.2f}", f"{long / short:.3f}")
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="a built model's directory")
    parser.add_argument("--short", type=int, default=200)
    parser.add_argument("--long", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    lengths = arguments.short, arguments.long
    Console().print(table(measure(arguments.target, lengths, arguments.rounds), lengths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
