"""llama.cpp's logits over whole chunks of text: its C interface, out of the library that the `xllamacpp` wheel holds.

The wheel's own server gives probabilities of generated positions only, which is a request a token.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xllamacpp

CHUNK = 512  # llama.cpp's default for tokens a physical batch


class _ModelParams(ctypes.Structure):
    """Taken from the library's defaults and given back as they are; the size is an upper bound."""

    _fields_ = (("opaque", ctypes.c_uint8 * 1024),)


class _ContextParams(ctypes.Structure):
    """Of the defaults, only the first field is changed."""

    _fields_ = (("n_ctx", ctypes.c_uint32), ("opaque", ctypes.c_uint8 * 1020))


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def _library() -> ctypes.CDLL:
    """The wheel's extension module, which exports llama.cpp's functions, with their types declared."""
    path = next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))
    library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    types: dict[str, tuple[Any, list[Any]]] = {
        "llama_log_set": (None, [pointer, pointer]),
        "llama_model_default_params": (_ModelParams, []),
        "llama_context_default_params": (_ContextParams, []),
        "llama_model_load_from_file": (pointer, [ctypes.c_char_p, _ModelParams]),
        "llama_init_from_model": (pointer, [pointer, _ContextParams]),
        "llama_set_n_threads": (None, [pointer, number, number]),
        "llama_batch_init": (_Batch, [number, number, number]),
        "llama_batch_free": (None, [_Batch]),
        "llama_decode": (number, [pointer, _Batch]),
        "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [pointer, number]),
        "llama_model_get_vocab": (pointer, [pointer]),
        "llama_vocab_n_tokens": (number, [pointer]),
        "llama_get_memory": (pointer, [pointer]),
        "llama_memory_clear": (None, [pointer, ctypes.c_bool]),
        "llama_free": (None, [pointer]),
        "llama_model_free": (None, [pointer]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class LlamaReader:
    """One model of llama.cpp's with one sequence. `forward` and `clear` are like `CausalLM`'s forward and truncate(0).

    Raises RuntimeError when llama.cpp refuses the file or a batch.
    """

    def __init__(self, gguf_path: Path, *, context_length: int, threads: int) -> None:
        self._library = _library()
        self._quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        self._library.llama_log_set(self._quiet, None)
        self._model = self._library.llama_model_load_from_file(
            str(gguf_path).encode(), self._library.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp can't load {gguf_path}")
        params = self._library.llama_context_default_params()
        params.n_ctx = context_length
        self._context = self._library.llama_init_from_model(self._model, params)
        self._library.llama_set_n_threads(self._context, threads, threads)
        self._vocab_size = self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(self._model))
        self._batch = self._library.llama_batch_init(CHUNK, 0, 1)
        self._length = 0

    def forward(self, tokens: Sequence[int], num_logits: int) -> npt.NDArray[np.float32]:
        """Append at most 512 tokens; the logits of the last `num_logits` of them, [num_logits, vocabulary]."""
        batch, first = self._batch, len(tokens) - num_logits
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, self._length + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = index >= first
        if self._library.llama_decode(self._context, batch) != 0:
            raise RuntimeError(f"llama.cpp can't decode {len(tokens)} tokens after {self._length}")
        self._length += len(tokens)
        rows = (self._library.llama_get_logits_ith(self._context, index) for index in range(first, len(tokens)))
        return np.stack([np.ctypeslib.as_array(row, (self._vocab_size,)) for row in rows])

    def clear(self) -> None:
        """Forget all tokens."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        self._length = 0

    def close(self) -> None:
        self._library.llama_batch_free(self._batch)
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)
