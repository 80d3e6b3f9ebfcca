"""The decoder graph against plain float64 numpy, and its cache's rewinding."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import xllamacpp

from shared.models.blocks import PAGE
from shared.models.build import build_model
from shared.models.graph import REFINED_IDS
from shared.models.quantise import Precision
from shared.models.scheme import Scheme, TensorClass
from shared.models.stored_graph import StoredGraph
from tests.random_decoder import DecoderShape, reference_logits, write_random_decoder

BUFFER = 48
# Q8_0 weights are carried over without loss and activations stay floats (level 0): the graph must be exact.
EXACT = Scheme("exact", 0, dict.fromkeys(TensorClass, Precision(8, 32, True)))
Q8_MATRICES = {"norm": "F32", "rope": "F32", "bias": "F32", "weight": "Q8_0"}
SHAPES = [
    DecoderShape("llama"),
    DecoderShape("llama", rope_factors=True),
    DecoderShape("qwen2", tied=False),
    DecoderShape("qwen3", head_size=32),
]


class Runner:
    """A session over one buffer that is past and present at once."""

    def __init__(self, directory: Path, batch: int = 1) -> None:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(str(directory / "model.onnx"), options)
        self.binding = self.session.io_binding()
        for value in self.session.get_inputs():
            if value.name.startswith("past_key_values"):
                cache = ort.OrtValue.ortvalue_from_numpy(
                    np.zeros((batch, value.shape[1], BUFFER, value.shape[3]), np.float32)
                )
                self.binding.bind_ortvalue_input(value.name, cache)
                self.binding.bind_ortvalue_output(value.name.replace("past_key_values", "present"), cache)

    def step(self, ids: np.ndarray, mask: np.ndarray, logits_from: int = 0) -> np.ndarray:
        """Logits [B, rows, vocab] of ids [B, S] after what `mask` [B, past + S] counts."""
        self.binding.bind_cpu_input("input_ids", ids.astype(np.int64))
        self.binding.bind_cpu_input("attention_mask", mask.astype(np.int64))
        start = ort.OrtValue.ortvalue_from_numpy(np.array([logits_from], np.int64))
        self.binding.bind_ortvalue_input("logits_from", start)
        rows = len(range(ids.shape[1])[logits_from:])
        logits = np.empty((len(ids), rows, self.session.get_outputs()[0].shape[2]), np.float32)
        self.binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(logits))
        self.session.run_with_iobinding(self.binding)
        return logits

    def one(self, ids: list[int], past: int, logits_from: int = 0) -> np.ndarray:
        """Logits [rows, vocab] of a single sequence."""
        return self.step(np.array([ids]), np.ones((1, past + len(ids))), logits_from)[0]


@dataclass(frozen=True)
class Built:
    """A built random decoder and what it must compute."""

    directory: Path
    shape: DecoderShape
    tensors: dict[str, np.ndarray]

    def expected(self, ids: list[int]) -> np.ndarray:
        return reference_logits(self.shape, self.tensors, ids)


def build(directory: Path, shape: DecoderShape) -> Built:
    tensors = write_random_decoder(directory / "random.gguf", shape, kinds=Q8_MATRICES)
    build_model(directory / "random.gguf", directory / "model", role=EXACT, progress=lambda _what, _done: None)
    return Built(directory / "model", shape, tensors)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("llama"), DecoderShape("llama"))


@pytest.fixture
def ids() -> list[int]:
    return np.random.default_rng(3).integers(3, 250, 21).tolist()


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> bool:
    """Whether the largest difference is under `tolerance` of the expected values' spread."""
    return bool(np.abs(actual - expected).max() < tolerance * expected.std())


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.architecture}-{shape.rope_factors}")
def test_logits_equal_the_float64_decoder(tmp_path: Path, shape: DecoderShape, ids: list[int]) -> None:
    built = build(tmp_path, shape)
    assert close(Runner(built.directory).one(ids, 0), built.expected(ids), 1e-4)


def test_a_wrong_rotation_would_be_seen(llama: Built, ids: list[int]) -> None:
    """The tolerance above is far smaller than what a mistake in the positions changes."""
    shifted = reference_logits(replace(llama.shape, theta=5000.0), llama.tensors, ids)
    assert not close(Runner(llama.directory).one(ids, 0), shifted, 1e-2)


def test_several_tokens_with_a_past_equal_one_at_a_time(llama: Built, ids: list[int]) -> None:
    together, apart = Runner(llama.directory), Runner(llama.directory)
    expected = [apart.one([token], past)[0] for past, token in enumerate(ids)]
    chunks = [together.one(ids[start:stop], start) for start, stop in ((0, 9), (9, 14), (14, 21))]
    assert np.abs(np.concatenate(chunks) - expected).max() < 1e-4


def test_rewinding_is_nothing_but_a_shorter_mask(llama: Built, ids: list[int]) -> None:
    runner = Runner(llama.directory)
    runner.one(ids[:10], 0)
    first = runner.one(ids[10:15], 10)
    for garbage in ([7, 8, 9], [4] * 11):
        runner.one(garbage, 10)
        assert np.array_equal(runner.one(ids[10:15], 10), first)
    runner.one(ids[10:15], 10)
    unrewound = runner.one(ids[10:15], 15)
    assert np.abs(unrewound - first).max() > 1e-2


@pytest.mark.parametrize(("logits_from", "rows"), [(0, 8), (5, 3), (7, 1), (8, 0), (-1, 1), (-3, 3)])
def test_only_the_wanted_rows_of_logits(llama: Built, ids: list[int], logits_from: int, rows: int) -> None:
    runner = Runner(llama.directory)
    everything = runner.one(ids[:8], 0)
    wanted = runner.one(ids[:8], 0, logits_from)
    assert wanted.shape[0] == rows
    assert np.allclose(wanted, everything[8 - rows :], atol=1e-5)


def test_the_optional_inputs_and_outputs_may_be_left_out(llama: Built, ids: list[int]) -> None:
    """What ONNX Runtime GenAI feeds: no logits_from, and a past that grows instead of a buffer."""
    session = Runner(llama.directory).session
    past = {
        value.name: np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past")
    }
    feed = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
    logits, hidden, key = session.run(["logits", "hidden_states", "present.0.key"], feed | past)
    assert np.allclose(logits[0], Runner(llama.directory).one(ids, 0), atol=1e-5)
    assert hidden.shape == (1, len(ids), llama.shape.hidden)
    assert key.shape == (1, llama.shape.kv_heads, len(ids), llama.shape.head_size)


def test_a_batch_of_single_tokens_with_different_pasts(llama: Built, ids: list[int]) -> None:
    lengths = [5, 12, 9]
    batch = Runner(llama.directory, batch=len(lengths))
    for position in range(max(lengths)):
        counts = [min(position, length - 1) + 1 for length in lengths]  # a finished row repeats its last token in place
        mask = np.arange(max(counts)) < np.array(counts)[:, None]
        logits = batch.step(np.array([[ids[count - 1]] for count in counts]), mask)
    for row, length in enumerate(lengths):
        assert np.abs(logits[row, 0] - Runner(llama.directory).one(ids[:length], 0)[-1]).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.architecture}-{shape.rope_factors}")
def test_llama_cpp_agrees_on_the_most_likely_token(tmp_path: Path, shape: DecoderShape, ids: list[int]) -> None:
    built = build(tmp_path, shape)
    params = xllamacpp.CommonParams()
    params.model.path = str(tmp_path / "random.gguf")
    params.n_ctx, params.n_parallel, params.warmup, params.port = 256, 1, False, 0
    params.fit_params, params.verbosity, params.cpuparams.n_threads = False, 0, 1
    server = xllamacpp.Server(params)
    logits = Runner(built.directory).one(ids, 0)
    compared = 0
    for length in range(1, len(ids)):
        row = logits[length - 1].astype(np.float64)
        request = {"prompt": ids[:length], "n_predict": 1, "temperature": 0, "n_probs": 1}
        answered = server.handle_completions(request)["choices"][0]["logprobs"]
        if answered is None:  # a token without text of its own (an end, half a character): nothing is said of it
            continue
        best = answered["content"][0]["top_logprobs"][0]
        assert best["logprob"] == pytest.approx(
            row[best["id"]] - np.log(np.exp(row).sum()), abs=0.1
        )  # its activations are rounded to 8 bits
        assert row[best["id"]] > row.max() - 0.1
        compared += 1
    assert compared > 10


@pytest.mark.parametrize("tied", [True, False])
def test_a_trimmed_vocabulary_is_the_first_ids_of_the_whole(tmp_path: Path, tied: bool, ids: list[int]) -> None:
    shape = DecoderShape("qwen2", tied=tied)
    write_random_decoder(tmp_path / "random.gguf", shape)
    rows = []
    for num_ids in (None, 100):
        scheme = Scheme("trimmed", 0, dict.fromkeys(TensorClass, Precision(4, 32, False)), num_ids=num_ids)
        directory = tmp_path / str(num_ids)
        build_model(tmp_path / "random.gguf", directory, role=scheme, progress=lambda _what, _done: None)
        rows.append(Runner(directory).one(ids, 0))
    assert rows[1].shape[1] == 100
    assert np.allclose(rows[0][:, :100], rows[1], atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_split_vocabulary_gives_the_likeliest_ids_all_their_bits(tmp_path: Path, tied: bool, ids: list[int]) -> None:
    tensors = write_random_decoder(tmp_path / "random.gguf", DecoderShape("qwen2", tied=tied))
    kinds = dict.fromkeys(TensorClass, Precision(8, 32, True))
    scheme = Scheme("split", 0, kinds, splits_vocabulary=True)
    built = tmp_path / "built"
    build_model(tmp_path / "random.gguf", built, role=scheme, progress=lambda _what, _done: None)
    session = Runner(built).session
    past = {
        value.name: np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past")
    }
    feed = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
    logits, hidden = (output[0] for output in session.run(["logits", "hidden_states"], feed | past))
    stored = StoredGraph(built / "model.onnx").stored("lm_head")
    expected = hidden @ stored.rows(slice(None)).T
    coarse = hidden @ replace(stored, fine=None).rows(slice(None)).T
    refined = np.argsort(-coarse, axis=-1)[:, :REFINED_IDS]
    wanted = coarse.copy()
    np.put_along_axis(wanted, refined, np.take_along_axis(expected, refined, -1), -1)
    assert np.abs(logits - wanted).max() < 1e-3 * expected.std()
    assert np.abs(logits - expected).max() > 0.1 * expected.std()  # the others have 4 bits
    assert np.array_equal(logits.argmax(-1), expected.argmax(-1))
    matrix = tensors["token_embd.weight" if tied else "output.weight"]
    assert np.linalg.norm(stored.rows(slice(None)) - matrix) < 0.012 * np.linalg.norm(matrix)
    graph = StoredGraph(built / "model.onnx")
    looked_up = ["lm_head.fine.codes"]
    if not tied:
        looked_up += ["embedding.codes", "embedding.scales", "embedding.fine.codes"]
    unread = sum(graph.array(name).nbytes for name in looked_up)
    weights = (built / "model.onnx.data").stat().st_size
    padding = PAGE * len(onnx.load(built / "model.onnx", load_external_data=False).graph.initializer)
    assert weights - padding < graph.bytes_read() + unread <= weights
