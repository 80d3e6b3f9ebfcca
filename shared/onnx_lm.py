"""Language models on ONNX Runtime: `OnnxModel` holds the weights, `OnnxCausalLM` one sequence's cache over them.

The cache is a buffer that is past and present at once (GroupQueryAttention writes the new rows into it), so that
rewinding is nothing but a smaller length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime as ort

from shared.causal_lm import Logits
from shared.cpus import usable_cpus
from shared.draft_head import Features
from shared.errors import ModelFileError, UnsupportedModelError
from shared.logits_memory import LogitsMemory
from shared.memory import mapped_while, untouched_zeros
from shared.onnx_sequence import OnnxSequence
from shared.onnx_session import bind_array, load_session, run_bound

LOGITS_FROM = "logits_from"
"""Our graphs' optional input: the first position whose logits are computed."""

HIDDEN_STATES = "hidden_states"
"""Our graphs' output after the last norm."""

KEPT_ROWS = 256
"""Tokens taken in before the pages of rows that were looked up are given back: 16 MB of an embedding."""

_NUMPY_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


@dataclass(frozen=True)
class DecoderConfig:
    """What `genai_config.json` says of the decoder."""

    model_path: Path
    vocab_size: int
    context_length: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    input_ids: str
    attention_mask: str
    position_ids: str
    past_key: str
    past_value: str
    logits: str
    present_key: str
    present_value: str

    @staticmethod
    def from_directory(directory: Path) -> DecoderConfig:
        """Read a directory in ONNX Runtime GenAI's layout.

        Raises:
            ModelFileError: the file is missing or isn't JSON.
            UnsupportedModelError: it describes no plain decoder.
        """
        path = directory / "genai_config.json"
        try:
            model = json.loads(path.read_text(encoding="utf-8"))["model"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelFileError(f"{path} can't be read as ONNX Runtime GenAI's configuration: {error}") from error
        try:
            decoder = model["decoder"]
            inputs, outputs = decoder.get("inputs", {}), decoder.get("outputs", {})
            return DecoderConfig(
                model_path=directory / decoder["filename"],
                vocab_size=int(model["vocab_size"]),
                context_length=int(model["context_length"]),
                num_layers=int(decoder["num_hidden_layers"]),
                num_kv_heads=int(decoder["num_key_value_heads"]),
                head_size=int(decoder["head_size"]),
                input_ids=inputs.get("input_ids", "input_ids"),
                attention_mask=inputs.get("attention_mask", "attention_mask"),
                position_ids=inputs.get("position_ids", "position_ids"),
                past_key=inputs.get("past_key_names", "past_key_values.%d.key"),
                past_value=inputs.get("past_value_names", "past_key_values.%d.value"),
                logits=outputs.get("logits", "logits"),
                present_key=outputs.get("present_key_names", "present.%d.key"),
                present_value=outputs.get("present_value_names", "present.%d.value"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UnsupportedModelError(f"{path} describes no decoder that can be run: {error!r} is missing") from error


class OnnxModel:
    """A decoder's weights, loaded once and shared by every sequence."""

    def __init__(self, directory: Path, *, context_length: int, num_threads: int | None = None) -> None:
        """Load a model directory.

        Raises:
            ModelFileError: a file is missing or ONNX Runtime can't read it.
            UnsupportedModelError: the graph's inputs and outputs aren't a decoder's.
        """
        self.directory = directory
        self.config = DecoderConfig.from_directory(directory)
        self.context_length = min(context_length, self.config.context_length)
        self.num_threads = num_threads or usable_cpus()
        self._session, self._weight_pages = mapped_while(directory, self._open)
        self._weight_pages.release()
        self._rows_looked_up = 0
        inputs = {value.name: value for value in self._session.get_inputs()}
        first_key = self.config.past_key % 0
        if first_key not in inputs or self.config.input_ids not in inputs:
            raise UnsupportedModelError(
                f"{self.config.model_path} has no inputs {self.config.input_ids!r} and {first_key!r}: not a decoder"
            )
        if inputs[first_key].type not in _NUMPY_TYPES:
            raise UnsupportedModelError(f"{self.config.model_path} keeps its cache as {inputs[first_key].type}")
        self.cache_type = _NUMPY_TYPES[inputs[first_key].type]
        logits = next(value for value in self._session.get_outputs() if value.name == self.config.logits)
        self._logits_type = _NUMPY_TYPES[logits.type]
        self._num_ids = logits.shape[-1] if isinstance(logits.shape[-1], int) else self.vocab_size
        self._has_position_ids = self.config.position_ids in inputs
        self._has_logits_from = LOGITS_FROM in {value.name for value in self._session.get_overridable_initializers()}

    def _open(self) -> ort.InferenceSession:
        return load_session(self.config.model_path, self.num_threads)

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""
        return self.config.vocab_size

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token adds."""
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_size * int(np.dtype(self.cache_type).itemsize)

    def new_cache(self) -> OnnxCausalLM:
        """A new, empty sequence. Its memory is touched only as it fills."""
        return OnnxCausalLM(self)

    def new_cache_with_hidden_states(self) -> OnnxHiddenStateLM:
        """A sequence that keeps its hidden states as well, for a draft head.

        Raises:
            UnsupportedModelError: the graph doesn't give them.
        """
        return OnnxHiddenStateLM(self)

    @property
    def hidden_size(self) -> int | None:
        """Numbers in a hidden state; None where the graph doesn't give them."""
        found = [value.shape[-1] for value in self._session.get_outputs() if value.name == HIDDEN_STATES]
        return int(found[0]) if found else None

    def binding(self) -> Any:
        """A fresh IOBinding for this model."""
        return self._session.io_binding()

    def new_logits(self) -> LogitsMemory:
        """Memory for the logits of passes. A projection that was trimmed knows the first ids only."""
        return LogitsMemory(slice(self._num_ids), self.vocab_size, self._logits_type)

    def run(
        self,
        binding: Any,
        tokens: Sequence[Sequence[int]],
        lengths: Sequence[int],
        num_logits: int,
        memory: LogitsMemory,
    ) -> Logits:
        """One pass over sequences whose caches are bound; logits [B, num_logits, V], in `memory`.

        tokens: [B, S]. lengths: tokens that each sequence holds before.

        Raises:
            EngineError: ONNX Runtime failed.
        """
        config, new = self.config, len(tokens[0])
        mask = np.zeros((len(tokens), max(lengths) + new), np.int64)
        for row, length in enumerate(lengths):
            mask[row, : length + new] = 1
        bind_array(binding, config.input_ids, np.array(tokens, np.int64))
        bind_array(binding, config.attention_mask, mask)
        if self._has_position_ids:
            bind_array(binding, config.position_ids, np.array(lengths, np.int64)[:, np.newaxis] + np.arange(new))
        rows = self._choose_logits(binding, new, num_logits)
        logits = memory.narrow(len(tokens), rows)
        binding.bind_ortvalue_output(config.logits, ort.OrtValue.ortvalue_from_numpy(logits))
        run_bound(self._session, binding, self.directory.name)
        self._forget_looked_up_rows(len(tokens) * new)
        return memory.widened(logits)[:, rows - num_logits :]

    def _forget_looked_up_rows(self, count: int) -> None:
        """Every so often. The system maps 16 pages around the row of each token that is looked up; in the end they
        would be the whole embedding."""
        self._rows_looked_up += count
        if self._rows_looked_up >= KEPT_ROWS:
            self._rows_looked_up = 0
            self._weight_pages.release()

    def _choose_logits(self, binding: Any, num_rows: int, num_logits: int) -> int:
        """Ask for the logits of the last rows; how many the graph will give."""
        if not self._has_logits_from:
            return num_rows
        bind_array(binding, LOGITS_FROM, np.array([num_rows - num_logits], np.int64))
        return num_logits


class OnnxCausalLM(OnnxSequence):
    """One sequence of an `OnnxModel`: a `CausalLM`."""

    def __init__(self, model: OnnxModel) -> None:
        super().__init__(model.vocab_size, model.context_length)
        self._model = model
        config = model.config
        self._logits = model.new_logits()
        self._binding = model.binding()
        shape = (1, config.num_kv_heads, model.context_length, config.head_size)
        # An idle cache costs address space, not memory.
        self._cache = [
            (untouched_zeros(shape, model.cache_type), untouched_zeros(shape, model.cache_type))
            for _ in range(config.num_layers)
        ]
        for layer, pair in enumerate(self._cache):
            for buffer, past, present in zip(
                pair, (config.past_key, config.past_value), (config.present_key, config.present_value), strict=True
            ):
                value = ort.OrtValue.ortvalue_from_numpy(buffer)
                self._binding.bind_ortvalue_input(past % layer, value)
                self._binding.bind_ortvalue_output(present % layer, value)

    def _run(self, tokens: Sequence[int], num_logits: int) -> Logits:
        return cast(Logits, self._model.run(self._binding, [tokens], [len(self._tokens)], num_logits, self._logits)[0])


class OnnxHiddenStateLM(OnnxCausalLM):
    """A sequence that keeps the hidden states of its tokens. They are an output of the pass that runs anyway, written
    where they stay."""

    def __init__(self, model: OnnxModel) -> None:
        super().__init__(model)
        if model.hidden_size is None:
            raise UnsupportedModelError(f"{model.config.model_path} gives no {HIDDEN_STATES!r}, which a head reads")
        self._hidden = untouched_zeros((model.context_length, model.hidden_size), np.float32)

    def hidden_states(self, start: int, stop: int) -> Features:
        """See `HiddenStates.hidden_states`."""
        if not 0 <= start <= stop <= len(self._tokens):
            raise ValueError(f"tokens {start}..{stop} are not within the {len(self._tokens)} of the cache")
        return self._hidden[start:stop]

    def _run(self, tokens: Sequence[int], num_logits: int) -> Logits:
        past = len(self._tokens)
        rows = self._hidden[np.newaxis, past : past + len(tokens)]
        self._binding.bind_ortvalue_output(HIDDEN_STATES, ort.OrtValue.ortvalue_from_numpy(rows))
        return super()._run(tokens, num_logits)
