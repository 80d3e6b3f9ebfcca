"""Draft heads on ONNX Runtime: `OnnxHead` holds the weights, `OnnxHeadCache` one sequence's cache over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import onnxruntime as ort

from shared.cached_tokens import CachedTokens
from shared.causal_lm import Logits
from shared.cpus import usable_cpus
from shared.draft_head import Features, HeadOutput
from shared.errors import ContextLengthError
from shared.logits_memory import LogitsMemory
from shared.memory import mapped_while, untouched_zeros
from shared.models.head import HeadDirectory
from shared.models.target_embedding import TargetEmbedding
from shared.onnx_lm import LOGITS_FROM
from shared.onnx_session import bind_array, load_session, run_bound


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
        threads = num_threads or usable_cpus()
        self.session, pages = mapped_while(directory.path, lambda: load_session(directory.model_path, threads))
        pages.release()

    def new_cache(self) -> OnnxHeadCache:
        """A new, empty sequence. Its memory is touched only as it fills."""
        return OnnxHeadCache(self)


class OnnxHeadCache(CachedTokens):
    """One sequence of an `OnnxHead`: a `DraftHead`."""

    def __init__(self, head: OnnxHead) -> None:
        super().__init__(head.context_length)
        self._head = head
        manifest = head.manifest
        self._mask = np.ones((1, head.context_length), np.int64)
        self._memory = LogitsMemory(head.vocabulary, manifest.vocab_size, np.float32)
        self._logits = self._memory.narrow(1, 1)
        self._binding = head.session.io_binding()
        bind_array(self._binding, LOGITS_FROM, np.array([-1], np.int64))
        self._binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(self._logits))
        shape = (1, manifest.num_kv_heads, head.context_length, manifest.head_size)
        for part in ("key", "value"):
            buffer = ort.OrtValue.ortvalue_from_numpy(untouched_zeros(shape, np.float32))
            self._binding.bind_ortvalue_input(f"past_key_values.0.{part}", buffer)
            self._binding.bind_ortvalue_output(f"present.0.{part}", buffer)

    def forward(self, tokens: Sequence[int], features: Features) -> HeadOutput:
        """See `DraftHead.forward`."""
        fed = tokens if self._tokens else tokens[1:]
        if len(features) != len(fed) or not len(fed):
            raise ValueError(f"{len(features)} features don't fit {len(tokens)} tokens after {len(self._tokens)}")
        if len(self._tokens) + len(tokens) > self.context_length:
            raise ContextLengthError(f"the head's context of {self.context_length} tokens has no room for more")
        logits, own = self._run(fed, features)
        self._tokens.extend(tokens)
        return HeadOutput(logits, own[-1:])

    def _run(self, tokens: Sequence[int], features: Features) -> tuple[Logits, Features]:
        """One pass: logits after the last token, [vocab_size], and the head's features, [S, feature size]."""
        head, binding, new = self._head, self._binding, len(tokens)
        past = max(len(self._tokens) - 1, 0)
        own = np.empty((new, head.manifest.feature_size), np.float32)
        bind_array(binding, "embeddings", head.embedding.rows(tokens)[np.newaxis])
        bind_array(binding, "features", np.ascontiguousarray(features, np.float32)[np.newaxis])
        bind_array(binding, "attention_mask", self._mask[:, : past + new])
        binding.bind_ortvalue_output("features_out", ort.OrtValue.ortvalue_from_numpy(own[np.newaxis]))
        run_bound(head.session, binding, head.name)
        return cast(Logits, self._memory.widened(self._logits)[0, 0]), own
