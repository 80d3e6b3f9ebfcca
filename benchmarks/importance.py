"""Measure how much each input of a GGUF's matrices matters, for builds to weigh rounding errors by:
`python -m benchmarks.importance --model qwen2.5-coder-1.5b-instruct`.

Reads this project's documentation and code with the model at 8 bits and keeps the mean square of every input
(`shared/models/importance.py`). The first token of a text is left out: its states are far larger than all others', and
none of them is ever what an answer hangs on.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper
from rich.progress import track

from shared.cpus import usable_cpus
from shared.models.build import build_model
from shared.models.cache import ModelCache
from shared.models.directory import MODEL_FILE
from shared.models.gguf_source import FloatArray, GgufSource
from shared.models.importance import Importance
from shared.models.pull import fetch_gguf
from shared.models.scheme import TensorClass
from shared.onnx_session import session_options
from shared.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
TEXTS = ("README.md", "README.zh-CN.md", "docs/*.md", "shared/*.py", "edge_agent/*.py", "edge_agent/web/*.js")
BEGINNING = 3000  # characters read of each text
CHUNK = 256  # tokens read together, each chunk a text of its own


class ProbedModel:
    """A model directory whose matrices' inputs are outputs as well."""

    def __init__(self, directory: Path) -> None:
        model = onnx.load(directory / MODEL_FILE, load_external_data=False)
        self._probes = _matrix_inputs(model)
        for name in sorted(set(self._probes.values())):
            model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
        probed = directory / "probed.onnx"
        onnx.save_model(model, probed)
        self._session = ort.InferenceSession(str(probed), session_options(usable_cpus()))
        self._empty = {
            value.name: np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
            for value in self._session.get_inputs()
            if value.name.startswith("past")
        }

    def sums_of_squares(self, ids: Sequence[int]) -> dict[tuple[TensorClass, int], FloatArray]:
        """Over the tokens after the first, [columns], by class and layer."""
        feed = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
        names = sorted(set(self._probes.values()))
        values = dict(zip(names, self._session.run(names, feed | self._empty), strict=True))
        return {where: np.square(values[name][0, 1:]).sum(axis=0) for where, name in self._probes.items()}


def _matrix_inputs(model: onnx.ModelProto) -> dict[tuple[TensorClass, int], str]:
    """The tensor that each layer's matrix multiplies. Nodes are named `layers.N.CLASS`."""
    parts = [(node.name.split("."), node.input[0]) for node in model.graph.node if node.op_type == "MatMulNBits"]
    return {(TensorClass(name[2]), int(name[1])): source for name, source in parts if name[0] == "layers"}


def measure(gguf_path: Path, num_tokens: int) -> Importance:
    """The importance of every input of the layers' matrices over `num_tokens` tokens."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "model"
        build_model(gguf_path, directory, role="q8", progress=lambda _what, _done: None, importance=Importance({}))
        ids = Tokenizer.from_directory(directory).encode(calibration_text())[:num_tokens]
        model = ProbedModel(directory)
        chunks = [ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK)]
        readings = [model.sums_of_squares(chunk) for chunk in track(chunks, "reading")]
    layers = GgufSource(gguf_path).architecture.num_layers
    kinds = (kind for kind in TensorClass if kind is not TensorClass.VOCABULARY)
    return Importance(
        {
            kind: np.stack([np.sum([reading[kind, layer] for reading in readings], axis=0) for layer in range(layers)])
            for kind in kinds
        }
    )


def calibration_text() -> str:
    """The beginnings of this project's documents and modules, one after another, kinds mixed."""
    paths = [sorted(ROOT.glob(pattern)) for pattern in TEXTS]
    longest = max(len(kind) for kind in paths)
    mixed = [kind[number] for number in range(longest) for kind in paths if number < len(kind)]
    return "\n\n".join(path.read_text(encoding="utf-8")[:BEGINNING] for path in mixed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a catalogue name, a GGUF or an hf: reference")
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    gguf_path = fetch_gguf(arguments.model, ModelCache())
    measure(gguf_path, arguments.tokens).save(GgufSource(gguf_path).sha256())


if __name__ == "__main__":
    main()
