"""GGUF files of a few random weights around a tokenizer, for what no model at hand has. llama.cpp loads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer, models, normalizers, trainers

from shared.models.gguf_tokenizer import GgufTokenizer, TokenType

_WIDTH = 32


@dataclass(frozen=True)
class TinyVocabulary:
    """The tokenizer's part of a GGUF."""

    model: str
    tokens: Sequence[str]
    types: Sequence[int]
    pre: str | None = None
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    bos_id: int = 1
    eos_id: int = 2
    add_space_prefix: bool | None = None
    add_bos: bool | None = None
    chat_template: str | None = None

    def with_pre(self, pre: str) -> TinyVocabulary:
        return replace(self, pre=pre)


def vocabulary_of(gguf_path: Path, num_merges: int = 3000) -> TinyVocabulary:
    """The byte-level vocabulary of a real file, with its first merges only."""
    source = GgufTokenizer.read(gguf_path)
    merges = source.merges[:num_merges]
    merged = {merge.replace(" ", "") for merge in merges}
    kept = [
        (token, kind)
        for token, kind in zip(source.tokens, source.types, strict=True)
        if kind != TokenType.NORMAL or len(token) == 1 or token in merged
    ]
    return TinyVocabulary("gpt2", [token for token, _ in kept], [kind for _, kind in kept], source.pre, merges)


def sentencepiece_vocabulary(text: str, size: int = 900, *, add_space_prefix: bool = True) -> TinyVocabulary:
    """A byte-pair vocabulary as SentencePiece lays it out: controls, bytes, merged pieces by rank, characters."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(text.split("\n"), trainers.BpeTrainer(vocab_size=size, show_progress=False))
    pieces = [piece for piece, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    merged = [piece for piece in pieces if len(piece) > 1]
    characters = [piece for piece in pieces if len(piece) == 1]
    controls = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<|assistant|>", "<tool>"]
    tokens = [*controls, *byte_tokens, *merged, *characters, *words]
    ordinary = len(merged) + len(characters)
    types = [
        TokenType.UNKNOWN,
        *[TokenType.CONTROL] * 2,
        *[TokenType.BYTE] * 256,
        *[TokenType.NORMAL] * ordinary,
        TokenType.CONTROL,
        TokenType.USER_DEFINED,
    ]
    scores = [*[0.0] * 259, *(-float(rank) for rank in range(ordinary)), 0.0, 0.0]
    return TinyVocabulary("llama", tokens, types, "default", scores=scores, add_space_prefix=add_space_prefix)


def write_tiny_gguf(path: Path, vocabulary: TinyVocabulary, *, architecture: str = "llama") -> Path:
    """One layer of 32 channels with this vocabulary."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_WIDTH // 2)
    writer.add_vocab_size(len(vocabulary.tokens))
    _add_tokenizer(writer, vocabulary)
    generator = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(vocabulary.tokens), _WIDTH),
        "output_norm.weight": (_WIDTH,),
        "blk.0.attn_norm.weight": (_WIDTH,),
        "blk.0.ffn_norm.weight": (_WIDTH,),
        "blk.0.attn_q.weight": (_WIDTH, _WIDTH),
        "blk.0.attn_k.weight": (_WIDTH // 2, _WIDTH),
        "blk.0.attn_v.weight": (_WIDTH // 2, _WIDTH),
        "blk.0.attn_output.weight": (_WIDTH, _WIDTH),
        "blk.0.ffn_gate.weight": (_WIDTH, _WIDTH),
        "blk.0.ffn_up.weight": (_WIDTH, _WIDTH),
        "blk.0.ffn_down.weight": (_WIDTH, _WIDTH),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, generator.standard_normal(shape).astype(np.float32) * 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, vocabulary: TinyVocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    if vocabulary.pre is not None:
        writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    writer.add_bos_token_id(vocabulary.bos_id)
    writer.add_eos_token_id(vocabulary.eos_id)
    if vocabulary.add_bos is not None:
        writer.add_add_bos_token(vocabulary.add_bos)
    if vocabulary.add_space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.add_space_prefix)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)
