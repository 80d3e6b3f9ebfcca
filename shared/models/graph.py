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

import onnx
from onnx import TensorProto, helper

from shared.models.blocks import MICROSOFT, ExternalData, GraphBlocks
from shared.models.gguf_source import Architecture, FloatArray
from shared.models.quantise import QuantisedMatrix


class DecoderGraph(GraphBlocks):
    """A whole decoder: add_lengths, add_rotary, add_vocabulary, add_layer for each, finish."""

    def __init__(self, architecture: Architecture, data: ExternalData, accuracy_level: int) -> None:
        super().__init__(architecture, data, accuracy_level)
        self._a = architecture

    def add_vocabulary(self, embedding: QuantisedMatrix, head: QuantisedMatrix, *, tied: bool) -> None:
        """The embedding's lookup, and the initializers of the vocabulary projection.

        `tied`: `head` is the first rows of the embedding. Then its initializers are others over the same bytes of the
        file: lookup and product want different shapes. Only the lookup's stay mapped, and of them only the rows that
        are read.
        """
        looked_up = embedding.arrays()
        looked_up["codes"] = embedding.codes.reshape(embedding.rows, -1)
        for part, array in looked_up.items():
            self._constant(f"embedding.{part}", array)
            if tied:
                alias = self._data.alias(f"lm_head.{part}", self._initializers[-1], head.arrays()[part].shape)
                self._initializers.append(alias)
        if not tied:
            self._matrix("lm_head", head)
        inputs = ["embedding.codes", "input_ids", *(f"embedding.{part}" for part in looked_up if part != "codes")]
        p = embedding.precision
        attributes = {"gather_axis": 0, "quantize_axis": 1, "bits": p.bits, "block_size": p.block}
        self._residual = self._node("GatherBlockQuantized", inputs, "embedding", MICROSOFT, **attributes)

    def finish(self, output_norm: FloatArray, head: QuantisedMatrix) -> onnx.ModelProto:
        """The last norm, the vocabulary projection, and the whole model."""
        hidden = self._norm("output_norm", output_norm, output="hidden_states")
        self._project(hidden, head, stored=True)
        value: Callable[..., onnx.ValueInfoProto] = helper.make_tensor_value_info
        ids = value("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"])
        logits = value("logits", TensorProto.FLOAT, ["batch_size", "logits_length", head.rows])
        states = value("hidden_states", TensorProto.FLOAT, ["batch_size", "sequence_length", self._a.hidden_size])
        return self._model("decoder", [ids], [logits, states])
