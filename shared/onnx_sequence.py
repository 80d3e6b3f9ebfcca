"""What every sequence over an ONNX decoder checks alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from shared.cached_tokens import CachedTokens
from shared.causal_lm import Logits
from shared.errors import ContextLengthError


class OnnxSequence(CachedTokens, ABC):
    """A `CausalLM` but for the pass itself."""

    def __init__(self, vocab_size: int, context_length: int) -> None:
        super().__init__(context_length)
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""
        return self._vocab_size

    def forward(self, tokens: Sequence[int], num_logits: int) -> Logits:
        """See `CausalLM.forward`. The logits are overwritten by the next pass."""
        past, new = len(self._tokens), len(tokens)
        if not 0 <= num_logits <= new or not new:
            raise ValueError(f"num_logits must be in 0..{new} for {new} tokens, got {num_logits}")
        if past + new > self.context_length:
            raise ContextLengthError(
                f"{past} tokens and {new} more don't fit into the context of {self.context_length} tokens"
            )
        logits = self._run(tokens, num_logits)
        self._tokens.extend(tokens)
        return logits

    @abstractmethod
    def _run(self, tokens: Sequence[int], num_logits: int) -> Logits:
        """A pass over `tokens`, which the cache doesn't count yet; logits [num_logits, V]."""
