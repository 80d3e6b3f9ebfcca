"""What a scheme costs and gives, against llama.cpp on the same GGUF:
`python -m benchmarks.quality --gguf FILE --schemes q8-mixed q4-mixed`.

For each scheme it builds the model in a temporary directory and prints a row: perplexity relative to llama.cpp's over
the texts of `benchmarks/data` (each read once, teacher-forced), how often both name the same next token, the
directory's size relative to the GGUF's, tokens a second relative to llama.cpp's (interleaved in this run), and resident
memory with a full context of 2,048 relative to the directory. A row that another one beats is marked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import xllamacpp

from shared.models.build import build_model
from shared.onnx_lm import OnnxCausalLM, OnnxModel
from shared.tokenizer import Tokenizer

CONTEXT = 2048
CHUNK = 128
CANDIDATES = (
    100  # llama.cpp's tokens asked for at each position; the whole vocabulary where the text's isn't among them
)
EVERYTHING = 1_000_000
DECODED = 16
ROUNDS = 5
TEXTS = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Reading:
    """A model's reading of one text: for each position after the first, its choice and the real token's log prob."""

    best: np.ndarray
    log_probs: np.ndarray


@dataclass(frozen=True)
class Row:
    """One scheme's results; ratios are to llama.cpp on the same file."""

    scheme: str
    perplexity_ratio: float
    agreement: float
    by_text: dict[str, tuple[float, float]]
    size_ratio: float
    speed_ratio: float
    memory_ratio: float

    def beaten_by(self, other: Row) -> bool:
        """Whether `other` is at least as good in quality, size and speed, and better in one."""
        mine = (self.perplexity_ratio, self.size_ratio, -self.speed_ratio)
        theirs = (other.perplexity_ratio, other.size_ratio, -other.speed_ratio)
        return theirs != mine and all(there <= here for here, there in zip(mine, theirs, strict=True))


class LlamaPeer:
    """llama.cpp in this process, one sequence."""

    def __init__(self, gguf_path: Path, threads: int) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(gguf_path)
        params.n_ctx, params.n_parallel, params.port = CONTEXT, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.fit_params, params.verbosity = False, 0
        self._server = xllamacpp.Server(params)

    def read(self, ids: Sequence[int]) -> Reading:
        """Teacher-forced, a token at a time: llama.cpp's server gives probabilities of generated positions only."""
        best, log_probs = [], []
        for position in range(1, len(ids)):
            found = self._probabilities(ids[:position], CANDIDATES)
            if ids[position] not in found:
                found = self._probabilities(ids[:position], EVERYTHING)
            best.append(max(found, key=lambda token: found[token]))
            log_probs.append(found[ids[position]])
        return Reading(np.array(best), np.array(log_probs))

    def milliseconds_per_token(self, ids: Sequence[int]) -> float:
        request = {"prompt": list(ids), "n_predict": DECODED, "temperature": 0, "ignore_eos": True}
        return float(self._ask(request)["timings"]["predicted_per_token_ms"])

    def _probabilities(self, ids: Sequence[int], count: int) -> dict[int, float]:
        request = {"prompt": list(ids), "n_predict": 1, "temperature": 0, "n_probs": count, "ignore_eos": False}
        answered = self._ask(request)["choices"][0]["logprobs"]
        if answered is None:  # nothing is said of an end token: ask for what would come instead of it
            answered = self._ask(request | {"ignore_eos": True})["choices"][0]["logprobs"]
        return {entry["id"]: entry["logprob"] for entry in answered["content"][0]["top_logprobs"]}

    def _ask(self, request: dict[str, Any]) -> Any:
        return self._server.handle_completions(request)


def read_ours(model: OnnxCausalLM, ids: Sequence[int]) -> Reading:
    """Our reading of the same text, a chunk at a time."""
    model.truncate(0)
    best, log_probs = [], []
    for start in range(0, len(ids) - 1, CHUNK):
        chunk = ids[start : start + CHUNK]
        following = ids[start + 1 : start + 1 + len(chunk)]
        logits = model.forward(chunk, len(chunk))[: len(following)].astype(np.float64)
        best.append(logits.argmax(axis=-1))
        highest = logits.max(axis=-1)
        total = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=-1))
        log_probs.append(logits[np.arange(len(following)), following] - total)
    return Reading(np.concatenate(best), np.concatenate(log_probs))


def compare(ours: Reading, theirs: Reading) -> tuple[float, float]:
    """Perplexity ratio and agreement."""
    ratio = float(np.exp((theirs.log_probs - ours.log_probs).mean()))
    return ratio, float((ours.best == theirs.best).mean())


def speed_ratio(model: OnnxCausalLM, peer: LlamaPeer, ids: Sequence[int]) -> float:
    """Our tokens a second over llama.cpp's, decoding after the same prompt, turn by turn."""
    ours, theirs = [], []
    for _ in range(ROUNDS):
        theirs.append(peer.milliseconds_per_token(ids))
        model.truncate(0)
        token = int(model.forward(ids, 1)[-1].argmax())
        started = time.perf_counter()
        for _ in range(DECODED):
            token = int(model.forward([token], 1)[-1].argmax())
        ours.append((time.perf_counter() - started) / DECODED * 1e3)
    return median(theirs) / median(ours)


def resident_bytes(directory: Path, threads: int) -> int:
    """Resident memory of a fresh process that has filled the whole context."""
    command = [sys.executable, "-m", "benchmarks.quality", "--resident", str(directory), "--threads", str(threads)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def fill_and_print_resident(directory: Path, threads: int) -> None:
    model = OnnxModel(directory, context_length=CONTEXT, num_threads=threads).new_cache()
    for _ in range(CONTEXT // CHUNK):
        model.forward([1] * CHUNK, 1)
    print(psutil.Process().memory_info().rss)


def measure(gguf_path: Path, schemes: Sequence[str], tokens_per_text: int, threads: int) -> Iterator[Row]:
    """A row for each scheme."""
    texts = {path.stem: path.read_text() for path in sorted(TEXTS.glob("*.txt"))}
    peer = LlamaPeer(gguf_path, threads)
    read_by_llama: dict[str, Reading] = {}
    for scheme in schemes:
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary) / "model"
            manifest = build_model(gguf_path, directory, role=scheme, progress=lambda _what, _done: None)
            tokenizer = Tokenizer.from_directory(directory)
            ids = {name: tokenizer.encode(text)[:tokens_per_text] for name, text in texts.items()}
            model = OnnxModel(directory, context_length=CONTEXT, num_threads=threads).new_cache()
            ours = {name: read_ours(model, ids[name]) for name in texts}
            for name in texts:
                if name not in read_by_llama:
                    read_by_llama[name] = peer.read(ids[name])
            ratio, agreement = compare(_joined(ours.values()), _joined(read_by_llama[name] for name in ours))
            yield Row(
                scheme,
                ratio,
                agreement,
                {name: compare(ours[name], read_by_llama[name]) for name in texts},
                manifest.total_bytes / manifest.source_bytes,
                speed_ratio(model, peer, next(iter(ids.values()))[:64]),
                resident_bytes(directory, threads) / manifest.total_bytes,
            )


def table(rows: Sequence[Row]) -> str:
    """Markdown; the Pareto front has no mark."""
    head = ["scheme", "perplexity", "agreement", *rows[0].by_text, "size", "tokens/s", "memory", ""]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        texts = [f"{ratio - 1:+.1%} / {agreement:.3f}" for ratio, agreement in row.by_text.values()]
        beaten = next((other.scheme for other in rows if row.beaten_by(other)), None)
        numbers = [f"{row.size_ratio:.3f}", f"{row.speed_ratio:.2f}", f"{row.memory_ratio:.2f}"]
        mark = f"beaten by {beaten}" if beaten else ""
        cells = [row.scheme, f"{row.perplexity_ratio - 1:+.2%}", f"{row.agreement:.3f}", *texts, *numbers, mark]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _joined(readings: Any) -> Reading:
    parts = list(readings)
    return Reading(np.concatenate([part.best for part in parts]), np.concatenate([part.log_probs for part in parts]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--schemes", nargs="+", default=["mixed", "q8", "q4-32", "q4"])
    parser.add_argument("--tokens", type=int, default=900, help="of each text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="rows as JSON lines instead of a table")
    parser.add_argument("--resident", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.resident:
        fill_and_print_resident(arguments.resident, arguments.threads)
        return
    if arguments.gguf is None:
        parser.error("--gguf is needed")
    rows = list(measure(arguments.gguf, arguments.schemes, arguments.tokens, arguments.threads))
    if arguments.json:
        print("\n".join(json.dumps(row.__dict__) for row in rows))
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
