"""The decoder as an ONNX graph, for ONNX Runtime's CPU kernels.

Inputs: input_ids int64 [B, S]; attention_mask int64 [B, past + S], ones for the tokens that count; for each layer
past_key_values.N.key and .value float32 [B, kv_heads, P, head_size], where P is the length of the past, or of the whole
buffer when past and present are bound to the same memory. Optional: logits_from int64 [1] (default 0), the first of
the S positions whose logits are wanted; a negative one counts from the end.

Outputs: logits float32 [B, S - logits_from, ids], of the whole vocabulary or, where the projection was trimmed, of its
first ids; hidden_states float32 [B, S, hidden], after the last norm; present.N.key and .value like the past. An output
that nobody asks for isn't copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from shared.models.blocks import MICROSOFT, ExternalData, GraphBlocks
from shared.models.gguf_source import Architecture, FloatArray
from shared.models.quantise import QuantisedMatrix, SplitMatrix

Vocabulary = QuantisedMatrix | SplitMatrix

REFINED_IDS: Final = 64
"""Logits of a row that are computed to 8 bits where the vocabulary is split. By 4 bits they are off by a tenth or so of
their spread; the likeliest id is never so far down.
"""


class DecoderGraph(GraphBlocks):
    """A whole decoder: add_lengths, add_rotary, add_vocabulary, add_layer for each, finish."""

    def __init__(self, architecture: Architecture, data: ExternalData, accuracy_level: int) -> None:
        super().__init__(architecture, data, accuracy_level)
        self._a = architecture

    def add_vocabulary(self, embedding: Vocabulary, head: Vocabulary, *, tied: bool) -> None:
        """The embedding's lookup, and the initializers of the vocabulary projection.

        `tied`: `head` is the first rows of the embedding. Then its initializers are others over the same bytes of the
        file: lookup and product want different shapes. Only the lookup's stay mapped, and of them only the rows that
        are read.
        """
        looked_up, projected = _whole_or_coarse(embedding), _whole_or_coarse(head)
        for part, array in looked_up.arrays().items():
            self._constant(f"embedding.{part}", array.reshape(len(array), -1))
            if tied:
                alias = self._data.alias(f"lm_head.{part}", self._initializers[-1], projected.arrays()[part].shape)
                self._initializers.append(alias)
        if not tied:
            self._matrix("lm_head", projected)
        if isinstance(head, SplitMatrix) and not tied:
            self._constant("lm_head.fine.codes", head.fine_codes.reshape(head.rows, -1))
        if isinstance(embedding, SplitMatrix):
            fine_codes = embedding.fine_codes.reshape(embedding.rows, -1)
            self._constant("embedding.fine.codes", fine_codes)
            if tied:
                shape = (projected.rows, fine_codes.shape[1])
                self._initializers.append(self._data.alias("lm_head.fine.codes", self._initializers[-1], shape))
            coarse = self._lookup("embedding", "input_ids", looked_up, "embedding.coarse")
            fine = self._fine_lookup("embedding", "input_ids", looked_up, "embedding.fine")
            self._residual = self._node("Add", [coarse, fine], "embedding")
        else:
            self._residual = self._lookup("embedding", "input_ids", looked_up, "embedding")

    def finish(self, output_norm: FloatArray, head: Vocabulary) -> onnx.ModelProto:
        """The last norm, the vocabulary projection, and the whole model."""
        hidden = self._norm("output_norm", output_norm, output="hidden_states")
        wanted = self._wanted(hidden)
        if isinstance(head, SplitMatrix):
            self._refined(wanted, head)
        else:
            self._product("lm_head", wanted, head, output="logits", stored=True)
        value: Callable[..., onnx.ValueInfoProto] = helper.make_tensor_value_info
        ids = value("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"])
        logits = value("logits", TensorProto.FLOAT, ["batch_size", "logits_length", head.rows])
        states = value("hidden_states", TensorProto.FLOAT, ["batch_size", "sequence_length", self._a.hidden_size])
        return self._model("decoder", [ids], [logits, states])

    def _refined(self, wanted: str, head: SplitMatrix) -> None:
        """Logits to 4 bits of the whole vocabulary, and to 8 bits of the likeliest ids by the former."""
        coarse = self._product("lm_head", wanted, head.coarse, output="logits.coarse", stored=True)
        self._constant("logits.refined", np.array([min(REFINED_IDS, head.rows)], np.int64))
        self._constant("axis.last", np.array([-1], np.int64))
        likeliest = ["logits.likeliest", "logits.ids"]
        inputs = [coarse, "logits.refined"]
        top = helper.make_node("TopK", inputs, likeliest, name=likeliest[0], axis=-1, largest=1, sorted=0)
        self._nodes.append(top)
        rows = self._fine_lookup("lm_head", "logits.ids", head.coarse, "logits.fine_rows")
        column = self._node("Unsqueeze", [wanted, "axis.last"], "logits.state")
        missing = self._node("MatMul", [rows, column], "logits.missing")
        missing = self._node("Squeeze", [missing, "axis.last"], "logits.missed")
        whole = self._node("Add", ["logits.likeliest", missing], "logits.whole")
        self._node("ScatterElements", [coarse, "logits.ids", whole], "logits", axis=-1)

    def _lookup(self, name: str, ids: str, matrix: QuantisedMatrix, output: str, *, codes: str = "codes") -> str:
        """The rows of a stored matrix, dequantised: [*ids, columns]."""
        others = [f"{name}.{part}" for part in matrix.arrays() if part != "codes"]
        p = matrix.precision
        attributes = {"gather_axis": 0, "quantize_axis": 1, "bits": p.bits, "block_size": p.block}
        return self._node("GatherBlockQuantized", [f"{name}.{codes}", ids, *others], output, MICROSOFT, **attributes)

    def _fine_lookup(self, name: str, ids: str, coarse: QuantisedMatrix, output: str) -> str:
        """What the rows of the coarse half miss. No scales are stored: they are a sixteenth of the coarse ones."""
        self._shared_constant("sixteenth", np.array(1 / 16, np.float32))
        rows = self._lookup(name, ids, coarse, f"{output}.unscaled", codes="fine.codes")
        return self._node("Mul", [rows, "sixteenth"], output)


def _whole_or_coarse(vocabulary: Vocabulary) -> QuantisedMatrix:
    return vocabulary.coarse if isinstance(vocabulary, SplitMatrix) else vocabulary
