"""The decoder as an ONNX graph, for ONNX Runtime's CPU kernels.

Inputs: input_ids int64 [B, S]; attention_mask int64 [B, past + S], ones for the tokens that count; for each layer
past_key_values.N.key and .value float32 [B, kv_heads, P, head_size], where P is the length of the past, or of the whole
buffer when past and present are bound to the same memory. Optional: logits_from int64 [1] (default 0), the first of
the S positions whose logits are wanted; a negative one counts from the end.

Outputs: logits float32 [B, S - logits_from, vocabulary]; hidden_states float32 [B, S, hidden], after the last norm;
present.N.key and .value like the past. An output that nobody asks for isn't copied.
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

    def add_vocabulary(self, embedding: QuantisedMatrix, head: QuantisedMatrix | None) -> None:
        """The embedding's lookup, and the initializers of the vocabulary projection.

        `head` None ties it to the embedding: two initializers over the same bytes of the file. Both are needed because
        lookup and product want different shapes; only the lookup's stays mapped, and of it only the rows that are read.
        """
        p = embedding.precision
        codes = self._data.add("lm_head.codes", (head or embedding).codes)
        scales = self._data.add("lm_head.scales", (head or embedding).scales)
        zeros = (head or embedding).zero_points
        self._initializers += [codes, scales] + ([] if zeros is None else [self._data.add("lm_head.zeros", zeros)])
        packed_columns = embedding.codes.shape[1] * embedding.codes.shape[2]
        if head is None:
            self._initializers.append(self._data.alias("embedding.codes", codes, (embedding.rows, packed_columns)))
            self._initializers.append(self._data.alias("embedding.scales", scales, embedding.scales.shape))
        else:
            self._constant("embedding.codes", embedding.codes.reshape(embedding.rows, packed_columns))
            self._constant("embedding.scales", embedding.scales)
        inputs = ["embedding.codes", "input_ids", "embedding.scales"]
        if embedding.zero_points is not None:
            self._constant("embedding.zeros", embedding.zero_points)
            inputs.append("embedding.zeros")
        attributes = {"gather_axis": 0, "quantize_axis": 1, "bits": p.bits, "block_size": p.block}
        self._residual = self._node("GatherBlockQuantized", inputs, "embedding", MICROSOFT, **attributes)

    def finish(self, output_norm: FloatArray, head: QuantisedMatrix) -> onnx.ModelProto:
        """The last norm, the vocabulary projection, and the whole model."""
        hidden = self._norm("output_norm", output_norm, output="hidden_states")
        self._project(hidden, head, stored=True)
        value: Callable[..., onnx.ValueInfoProto] = helper.make_tensor_value_info
        ids = value("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"])
        logits = value("logits", TensorProto.FLOAT, ["batch_size", "logits_length", self._a.vocab_size])
        states = value("hidden_states", TensorProto.FLOAT, ["batch_size", "sequence_length", self._a.hidden_size])
        return self._model("decoder", [ids], [logits, states])
