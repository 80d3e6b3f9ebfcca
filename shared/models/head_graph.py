"""A draft head as an ONNX graph: one decoder layer over the target's hidden states and the next tokens' embeddings.

    x = fusion(concat(RMSNorm(embedding of token i + 1), RMSNorm(feature i)))
    x = x + Attention(RMSNorm(x));  x = x + SwiGLU(RMSNorm(x))
    logits of token i + 2 = lm_head(RMSNorm(x)), over a trimmed vocabulary

Feature i is the target's hidden state after the last norm, or, where the head drafts on, x itself; of a moved head,
expansion(x).

Inputs: embeddings and features float32 [B, S, target's hidden size]; attention_mask, past_key_values.0.* and
logits_from as in a decoder's graph. Outputs: logits float32 [B, S - logits_from, trimmed vocabulary]; features_out
float32 [B, S, target's hidden size], what stands for each position's feature; present.0.*.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx
from onnx import TensorProto, helper

from shared.models.blocks import GraphBlocks
from shared.models.gguf_source import FloatArray
from shared.models.quantise import QuantisedMatrix


class HeadGraph(GraphBlocks):
    """A draft head: add_lengths, add_rotary, add_fusion, add_layer, finish."""

    def add_fusion(self, embedding_norm: FloatArray, feature_norm: FloatArray, fusion: QuantisedMatrix) -> None:
        """Embeddings and features become the layer's input."""
        normed = [
            self._plain_norm("embedding_norm", "embeddings", embedding_norm),
            self._plain_norm("feature_norm", "features", feature_norm),
        ]
        self._residual = self._product("fusion", self._node("Concat", normed, "fused", axis=-1), fusion)

    def finish(
        self, output_norm: FloatArray, lm_head: QuantisedMatrix, expansion: QuantisedMatrix | None
    ) -> onnx.ModelProto:
        """The last norm, the projection onto the trimmed vocabulary, and the whole model.

        expansion: of a moved head, to the target's hidden size.
        """
        own = "features_out" if expansion is None else "own_features"
        normed = self._norm("output_norm", output_norm, summed=own)
        if expansion is not None:
            self._product("expansion", own, expansion, output="features_out")
        self._product("lm_head", self._wanted(normed), lm_head, output="logits")
        value: Callable[..., onnx.ValueInfoProto] = helper.make_tensor_value_info
        feature_size = len(output_norm) if expansion is None else expansion.rows
        sequence = ["batch_size", "sequence_length", feature_size]
        inputs = [value(name, TensorProto.FLOAT, sequence) for name in ("embeddings", "features")]
        logits = value("logits", TensorProto.FLOAT, ["batch_size", "logits_length", lm_head.rows])
        return self._model("head", inputs, [logits, value("features_out", TensorProto.FLOAT, sequence)])
