"""GGUF files of small random decoders, and the same decoders computed in float64 with plain numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from tokenizers import pre_tokenizers

from tests.tiny_gguf import TinyVocabulary, _add_tokenizer

Array = np.ndarray
BYTE_CHARACTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


@dataclass(frozen=True)
class DecoderShape:
    """Sizes small enough to build in a second, with more query heads than key heads and rows that fit GGUF's blocks."""

    architecture: str
    num_layers: int = 2
    hidden: int = 64
    ffn: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    theta: float = 10000.0
    epsilon: float = 1e-5
    vocab: int = len(BYTE_CHARACTERS) + 4
    tied: bool = True
    rope_factors: bool = False
    context: int = 256

    @property
    def has_bias(self) -> bool:
        return self.architecture == "qwen2"

    @property
    def has_qk_norm(self) -> bool:
        return self.architecture == "qwen3"


def byte_vocabulary() -> TinyVocabulary:
    """A token for each byte, one merge and three controls."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTE_CHARACTERS, "th"]
    types = [3, 3, 3, *[1] * (len(BYTE_CHARACTERS) + 1)]
    return TinyVocabulary("gpt2", tokens, types, "qwen2", ["t h"], bos_id=0, eos_id=2)


def write_random_decoder(
    path: Path,
    shape: DecoderShape,
    *,
    kinds: Mapping[str, str] | None = None,
    seed: int = 0,
    skip: str = "",
    chat_template: str | None = None,
) -> dict[str, Array]:
    """Write the file; returns its tensors' values as float64, in the row order of Hugging Face's checkpoints.

    `kinds` maps a part of a tensor's name to the GGUF type that it is stored in (default F32). `skip` leaves one out.
    """
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(f"random {shape.architecture}")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_rope_freq_base(shape.theta)
    _add_tokenizer(writer, replace(byte_vocabulary(), chat_template=chat_template))
    tensors = {}
    for name, size in _sizes(shape).items():
        if name == skip:
            continue
        values = _random_values(rng, name, size)
        kind = next((kind for part, kind in (kinds or {}).items() if part in name), "F32")
        stored = _interleave(values, name, shape)
        if kind == "F32":
            writer.add_tensor(name, stored)
        else:
            quantised = quantize(stored, gguf.GGMLQuantizationType[kind])
            writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
            stored = dequantize(quantised, gguf.GGMLQuantizationType[kind])
        tensors[name] = _deinterleave(stored, name, shape).astype(np.float64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def reference_logits(shape: DecoderShape, tensors: Mapping[str, Array], ids: list[int]) -> Array:
    """Logits [len(ids), vocab] of the plain decoder in float64."""
    hidden = tensors["token_embd.weight"][ids]
    for layer in range(shape.num_layers):
        t = {name.split(".", 2)[2]: value for name, value in tensors.items() if name.startswith(f"blk.{layer}.")}
        hidden = hidden + _attention(shape, t, _rms(hidden, t["attn_norm.weight"], shape), tensors)
        normed = _rms(hidden, t["ffn_norm.weight"], shape)
        gate, up = normed @ t["ffn_gate.weight"].T, normed @ t["ffn_up.weight"].T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ t["ffn_down.weight"].T
    head = tensors.get("output.weight", tensors["token_embd.weight"])
    return _rms(hidden, tensors["output_norm.weight"], shape) @ head.T


def _attention(shape: DecoderShape, t: Mapping[str, Array], x: Array, tensors: Mapping[str, Array]) -> Array:
    length, size = len(x), shape.head_size
    parts = [x @ t[f"attn_{part}.weight"].T + t.get(f"attn_{part}.bias", 0.0) for part in "qkv"]
    query, key, value = (part.reshape(length, -1, size) for part in parts)
    if shape.has_qk_norm:
        query, key = _rms(query, t["attn_q_norm.weight"], shape), _rms(key, t["attn_k_norm.weight"], shape)
    factors = tensors.get("rope_freqs.weight", np.ones(size // 2))
    query, key = _rotate(query, shape, factors), _rotate(key, shape, factors)
    group = shape.heads // shape.kv_heads
    key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(size)
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", weights, value).reshape(length, -1)
    return mixed @ t["attn_output.weight"].T


def _rotate(x: Array, shape: DecoderShape, factors: Array) -> Array:
    """Rotary embedding by halves: dimension i turns with dimension i + size / 2."""
    size = shape.head_size
    frequencies = shape.theta ** (-np.arange(0, size, 2) / size) / factors
    angles = np.outer(np.arange(len(x)), frequencies)[:, None]
    first, second = x[..., : size // 2], x[..., size // 2 :]
    turned = [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
    return np.concatenate(turned, axis=-1)


def _rms(x: Array, weight: Array, shape: DecoderShape) -> Array:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + shape.epsilon) * weight


def _sizes(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    sizes: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocab, shape.hidden)}
    for layer in range(shape.num_layers):
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (shape.hidden,),
            "attn_q.weight": (queries, shape.hidden),
            "attn_k.weight": (keys, shape.hidden),
            "attn_v.weight": (keys, shape.hidden),
            "attn_output.weight": (shape.hidden, queries),
            "ffn_norm.weight": (shape.hidden,),
            "ffn_gate.weight": (shape.ffn, shape.hidden),
            "ffn_up.weight": (shape.ffn, shape.hidden),
            "ffn_down.weight": (shape.hidden, shape.ffn),
        }
        if shape.has_bias:
            parts |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
        if shape.has_qk_norm:
            parts |= {"attn_q_norm.weight": (shape.head_size,), "attn_k_norm.weight": (shape.head_size,)}
        sizes |= {f"blk.{layer}.{name}": size for name, size in parts.items()}
    sizes["output_norm.weight"] = (shape.hidden,)
    if not shape.tied:
        sizes["output.weight"] = (shape.vocab, shape.hidden)
    if shape.rope_factors:
        sizes["rope_freqs.weight"] = (shape.head_size // 2,)
    return sizes


def _random_values(rng: np.random.Generator, name: str, size: tuple[int, ...]) -> Array:
    values = rng.standard_normal(size).astype(np.float32)
    if name == "rope_freqs.weight":
        return np.abs(values) + np.float32(1)
    if "norm" in name:
        return np.float32(1) + values * np.float32(0.2)
    return values * np.float32(0.2 if len(size) == 2 else 0.5)


def _llama_heads(name: str, shape: DecoderShape) -> int | None:
    """llama.cpp stores these rows of llama models for rotation of neighbours."""
    if shape.architecture != "llama" or (".attn_q.weight" not in name and ".attn_k.weight" not in name):
        return None
    return shape.heads if ".attn_q." in name else shape.kv_heads


def _interleave(values: Array, name: str, shape: DecoderShape) -> Array:
    heads = _llama_heads(name, shape)
    if heads is None:
        return values
    return np.ascontiguousarray(values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape))


def _deinterleave(values: Array, name: str, shape: DecoderShape) -> Array:
    heads = _llama_heads(name, shape)
    if heads is None:
        return values
    return values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
