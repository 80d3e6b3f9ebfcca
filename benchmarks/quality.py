"""What a scheme costs and gives, against llama.cpp on the same GGUF:
`python -m benchmarks.quality --gguf FILE --schemes q8-mixed,q4-mixed`.

For each scheme it builds the model in a temporary directory and prints a row: perplexity relative to llama.cpp's over
the texts of `benchmarks/data` (teacher-forced, each from its beginning), how often both name the same next token, the
directory's size relative to the GGUF's, tokens a second of both (turn by turn in this run), and resident memory with a
full context of 2,048. A row that another one beats in quality, size and speed is marked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import psutil

from benchmarks.llama_reader import LlamaReader
from shared.cpus import usable_cpus
from shared.models.build import build_model
from shared.models.cache import ModelCache
from shared.models.pull import fetch_gguf
from shared.onnx_lm import OnnxCausalLM, OnnxModel
from shared.tokenizer import Tokenizer

CONTEXT = 2048
CHUNK = 128
PROMPT = 64
DECODED = 16
ROUNDS = 5
TEXTS = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Reading:
    """A model's reading of one text: for each position after the first, its choice and the real token's log prob."""

    best: npt.NDArray[np.intp]
    log_probs: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """One scheme's results; ratios are to llama.cpp on the same file."""

    scheme: str
    perplexity_ratio: float
    agreement: float
    by_text: dict[str, tuple[float, float]]
    size_ratio: float
    tokens_per_second: float
    llama_tokens_per_second: float
    resident_megabytes: float

    @property
    def speed_ratio(self) -> float:
        return self.tokens_per_second / self.llama_tokens_per_second

    def beaten_by(self, other: Row) -> bool:
        """Whether `other` is at least as good in quality, size and speed, and better in one."""
        mine = (self.perplexity_ratio, self.size_ratio, -self.speed_ratio)
        theirs = (other.perplexity_ratio, other.size_ratio, -other.speed_ratio)
        return theirs != mine and all(there <= here for here, there in zip(mine, theirs, strict=True))


class Decoder(Protocol):
    """Appends tokens to a sequence; the logits of the last `num_logits` of them, [num_logits, vocabulary]."""

    def forward(self, tokens: Sequence[int], num_logits: int) -> npt.NDArray[np.floating]: ...


def read(model: Decoder, ids: Sequence[int]) -> Reading:
    """Teacher-forced, a chunk at a time, from an empty sequence on."""
    best, log_probs = [], []
    for start in range(0, len(ids) - 1, CHUNK):
        chunk = ids[start : start + CHUNK]
        following = ids[start + 1 : start + 1 + len(chunk)]
        logits = model.forward(chunk, len(chunk))[: len(following)]
        best.append(logits.argmax(axis=-1))
        highest = logits.max(axis=-1)
        total = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=-1, dtype=np.float64))
        log_probs.append(logits[np.arange(len(following)), following] - total)
    return Reading(np.concatenate(best), np.concatenate(log_probs))


def compare(ours: Reading, theirs: Reading) -> tuple[float, float]:
    """Perplexity ratio and agreement."""
    ratio = float(np.exp((theirs.log_probs - ours.log_probs).mean()))
    return ratio, float((ours.best == theirs.best).mean())


def tokens_per_second(ours: OnnxCausalLM, theirs: LlamaReader, ids: Sequence[int]) -> tuple[float, float]:
    """Ours and llama.cpp's, medians over turns taken one after the other, decoding greedily after the same prompt."""
    our_seconds, their_seconds = [], []
    for _ in range(ROUNDS):
        ours.truncate(0)
        our_seconds.append(_decode_seconds(ours, ids))
        theirs.clear()
        their_seconds.append(_decode_seconds(theirs, ids))
    return DECODED / median(our_seconds), DECODED / median(their_seconds)


def _decode_seconds(decoder: Decoder, ids: Sequence[int]) -> float:
    token = int(decoder.forward(ids, 1)[-1].argmax())
    started = time.perf_counter()
    for _ in range(DECODED):
        token = int(decoder.forward([token], 1)[-1].argmax())
    return time.perf_counter() - started


def resident_bytes(directory: Path, threads: int) -> int:
    """Resident memory of a fresh process that has filled the whole context."""
    command = [sys.executable, "-m", "benchmarks.quality", "--resident", str(directory), "--threads", str(threads)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def fill_and_print_resident(directory: Path, threads: int) -> None:
    model = OnnxModel(directory, context_length=CONTEXT, num_threads=threads).new_cache()
    for _ in range(CONTEXT // CHUNK):
        model.forward([1] * CHUNK, 1)
    print(psutil.Process().memory_info().rss)


class Comparison:
    """llama.cpp's side, read once: what every scheme of this GGUF is held against."""

    def __init__(self, gguf_path: Path, tokens_per_text: int, threads: int) -> None:
        self._gguf_path, self._tokens_per_text, self._threads = gguf_path, tokens_per_text, threads
        self._texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob("*.txt"))}
        self._llama = LlamaReader(gguf_path, context_length=CONTEXT, threads=threads)
        self._by_llama: dict[str, Reading] = {}

    def build_and_measure(self, scheme: str) -> Row:
        """Build the scheme in a temporary directory and measure it."""
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary) / "model"
            started = time.perf_counter()
            build_model(self._gguf_path, directory, role=scheme, progress=lambda _what, _done: None)
            _say(f"{scheme}: built in {time.perf_counter() - started:.0f} s")
            return self.measure(scheme, directory)

    def measure(self, name: str, directory: Path) -> Row:
        """A row for a model directory built from this GGUF."""
        tokenizer = Tokenizer.from_directory(directory)
        model = OnnxModel(directory, context_length=CONTEXT, num_threads=self._threads).new_cache()
        ours: dict[str, Reading] = {}
        for text, content in self._texts.items():
            ids = tokenizer.encode(content)[: self._tokens_per_text]
            ours[text] = self._read_ours(model, ids)
            if text not in self._by_llama:
                self._llama.clear()
                self._by_llama[text] = read(self._llama, ids)
            _say(f"{name}: {text}, {len(ids)} tokens: {_cell(*compare(ours[text], self._by_llama[text]))}")
        ratio, agreement = compare(_joined(ours.values()), _joined(self._by_llama[text] for text in ours))
        speeds = tokens_per_second(model, self._llama, tokenizer.encode(next(iter(self._texts.values())))[:PROMPT])
        files = sum(path.stat().st_size for path in directory.iterdir() if not path.name.startswith("."))
        return Row(
            name,
            ratio,
            agreement,
            {text: compare(ours[text], self._by_llama[text]) for text in ours},
            files / self._gguf_path.stat().st_size,
            *speeds,
            resident_bytes(directory, self._threads) / 1e6,
        )

    def close(self) -> None:
        self._llama.close()

    @staticmethod
    def _read_ours(model: OnnxCausalLM, ids: Sequence[int]) -> Reading:
        model.truncate(0)
        return read(model, ids)


def table(rows: Sequence[Row]) -> str:
    """Markdown; the Pareto front has no mark."""
    head = ["scheme", "perplexity", "agreement", *rows[0].by_text, "size / GGUF", "tokens/s", "llama.cpp's", "MB", ""]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        beaten = next((other.scheme for other in rows if row.beaten_by(other)), None)
        cells = [
            row.scheme,
            f"{row.perplexity_ratio - 1:+.2%}",
            f"{row.agreement:.3f}",
            *(_cell(*pair) for pair in row.by_text.values()),
            f"{row.size_ratio:.3f}",
            f"{row.tokens_per_second:.1f}",
            f"{row.llama_tokens_per_second:.1f}",
            f"{row.resident_megabytes:.0f}",
            f"beaten by {beaten}" if beaten else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(perplexity_ratio: float, agreement: float) -> str:
    return f"{perplexity_ratio - 1:+.1%} / {agreement:.3f}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _joined(readings: Any) -> Reading:
    parts = list(readings)
    return Reading(np.concatenate([part.best for part in parts]), np.concatenate([part.log_probs for part in parts]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--gguf", type=Path)
    source.add_argument("--model", help="a catalogue name or an hf: reference; its GGUF is fetched if need be")
    source.add_argument("--resident", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--schemes", type=_names, default=[], help="schemes to build and measure, a,b,…")
    parser.add_argument("--directories", type=_names, default=[], help="directories built before from this GGUF, a,b,…")
    parser.add_argument("--tokens", type=int, default=700, help="of each text")
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--json", action="store_true", help="rows as JSON lines instead of a table")
    arguments = parser.parse_args()
    if arguments.resident:
        fill_and_print_resident(arguments.resident, arguments.threads)
        return
    gguf_path = arguments.gguf or fetch_gguf(arguments.model, ModelCache())
    schemes = arguments.schemes or ([] if arguments.directories else ["mixed", "q8", "q4"])
    comparison = Comparison(gguf_path, arguments.tokens, arguments.threads)
    try:
        rows = [comparison.measure(Path(path).name, Path(path)) for path in arguments.directories]
        rows += [comparison.build_and_measure(scheme) for scheme in schemes]
    finally:
        comparison.close()
    print("\n".join(json.dumps(asdict(row)) for row in rows) if arguments.json else table(rows))


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main()
