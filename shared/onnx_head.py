"""Draft heads on ONNX Runtime: `OnnxHead` holds the weights, `OnnxHeadCache` one sequence's cache over them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from shared.causal_lm import Logits
from shared.cpus import usable_cpus
from shared.draft_head import Features, HeadOutput
from shared.errors import ContextLengthError
from shared.models.head import HeadDirectory
from shared.models.target_embedding import TargetEmbedding
from shared.onnx_lm import LOGITS_FROM
from shared.onnx_session import bind_array, load_session, run_bound

UNKNOWN_LOGIT = -1e4
"""Of an id that the head doesn't know: never drawn beside known ones, and still finite where a grammar leaves no other.
"""


class OnnxHead:
    """A head's weights, loaded once and shared by every sequence."""

    def __init__(
        self,
        directory: HeadDirectory,
        embedding: TargetEmbedding,
        *,
        context_length: int,
        num_threads: int | None = None,
    ) -> None:
        """embedding: of the target that the head belongs to.

        Raises:
            ModelFileError: ONNX Runtime can't read the graph.
        """
        self.name = directory.path.name
        self.manifest = directory.manifest
        self.vocabulary = directory.vocabulary
        self.embedding = embedding
        self.context_length = min(context_length, directory.manifest.context_length)
        self.session = load_session(directory.model_path, num_threads or usable_cpus())

    def new_cache(self) -> OnnxHeadCache:
        """A new, empty sequence. Its memory is touched only as it fills."""
        return OnnxHeadCache(self)


class OnnxHeadCache:
    """One sequence of an `OnnxHead`: a `DraftHead`."""

    def __init__(self, head: OnnxHead) -> None:
        self._head = head
        self._tokens: list[int] = []
        manifest = head.manifest
        self._mask = np.ones((1, head.context_length), np.int64)
        self._logits = np.empty(manifest.num_ids, np.float32)
        self._row = np.full(manifest.vocab_size, UNKNOWN_LOGIT, np.float32)
        self._binding = head.session.io_binding()
        bind_array(self._binding, LOGITS_FROM, np.array([-1], np.int64))
        logits = ort.OrtValue.ortvalue_from_numpy(self._logits[np.newaxis, np.newaxis])
        self._binding.bind_ortvalue_output("logits", logits)
        shape = (1, manifest.num_kv_heads, head.context_length, manifest.head_size)
        for part in ("key", "value"):
            # np.zeros maps pages without touching them: an idle cache costs address space, not memory.
            buffer = ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
            self._binding.bind_ortvalue_input(f"past_key_values.0.{part}", buffer)
            self._binding.bind_ortvalue_output(f"present.0.{part}", buffer)

    @property
    def context_length(self) -> int:
        """Most tokens that the cache can hold."""
        return self._head.context_length

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens that were taken in."""
        return self._tokens

    def forward(self, tokens: Sequence[int], features: Features) -> HeadOutput:
        """See `DraftHead.forward`."""
        fed = tokens if self._tokens else tokens[1:]
        if len(features) != len(fed) or not len(fed):
            raise ValueError(f"{len(features)} features don't fit {len(tokens)} tokens after {len(self._tokens)}")
        if len(self._tokens) + len(tokens) > self.context_length:
            raise ContextLengthError(f"the head's context of {self.context_length} tokens has no room for more")
        logits, own = self._run(fed, features)
        self._tokens.extend(tokens)
        self._row[self._head.vocabulary] = logits
        return HeadOutput(self._row, own[-1:])

    def truncate(self, length: int) -> None:
        """See `DraftHead.truncate`."""
        if not 0 <= length <= len(self._tokens):
            raise ValueError(f"length must be in 0..{len(self._tokens)}, got {length}")
        del self._tokens[length:]

    def _run(self, tokens: Sequence[int], features: Features) -> tuple[Logits, Features]:
        """One pass: logits of the known ids after the last token, [V], and the head's features, [S, hidden size]."""
        head, binding, new = self._head, self._binding, len(tokens)
        past = max(len(self._tokens) - 1, 0)
        own = np.empty((new, head.manifest.hidden_size), np.float32)
        bind_array(binding, "embeddings", head.embedding.rows(tokens)[np.newaxis])
        bind_array(binding, "features", np.ascontiguousarray(features, np.float32)[np.newaxis])
        bind_array(binding, "attention_mask", self._mask[:, : past + new])
        binding.bind_ortvalue_output("features_out", ort.OrtValue.ortvalue_from_numpy(own[np.newaxis]))
        run_bound(head.session, binding, head.name)
        return self._logits, own
