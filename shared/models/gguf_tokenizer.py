"""The tokenizer that a GGUF carries, written as `tokenizer.json` and its companions.

Ids come out equal to llama.cpp's: the same pre-tokenizer patterns, no Unicode normalisation (llama.cpp has none, so a
text survives a round trip even where the publisher normalised it), control tokens kept apart from text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from shared.errors import UnsupportedModelError

_GPT2_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Case is spelled out: a case-insensitive group would also fold the long s (U+017F) into these endings.
_CONTRACTIONS: Final = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SYMBOLS_AND_SPACES: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_WORDS: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS_AND_SPACES}"
_LLAMA3_WORDS: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACES}"
_QWEN35_WORDS: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words before byte-pair merges: each pattern cuts what the one before left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is a token as a whole is taken, whatever its merges say."""
    add_bos: bool = False
    """Where the file does not say."""


_GPT2: Final = PreTokenizer((_GPT2_WORDS,))
_DIGITS_THEN_GPT2: Final = PreTokenizer((r"\p{N}", _GPT2_WORDS))
_QWEN2: Final = PreTokenizer((_QWEN2_WORDS,))
_LLAMA3: Final = PreTokenizer((_LLAMA3_WORDS,), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "command-r": _DIGITS_THEN_GPT2,
    "qwen2": _QWEN2,
    "qwen3": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": PreTokenizer((_QWEN35_WORDS,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}

_END_TEXTS: Final = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "<|end_of_text|>")
)
"""Tokens that end an answer by their name alone; llama.cpp goes by the same names."""


@dataclass(frozen=True)
class GgufTokenizer:
    """What a GGUF says about its tokenizer."""

    model: str
    pre: str | None
    tokens: Sequence[str]
    types: Sequence[TokenType]
    merges: Sequence[str]
    scores: Sequence[float]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    end_ids: tuple[int, ...]
    add_bos: bool | None
    add_space_prefix: bool
    chat_template: str | None

    @classmethod
    def read(cls, path: Path) -> GgufTokenizer:
        """Reads the metadata; no weight is touched. A file without a tokenizer is an `UnsupportedModelError`."""
        fields = gguf.GGUFReader(path).fields

        def value(name: str, default: Any = None) -> Any:
            return fields[name].contents() if name in fields else default

        tokens = value("tokenizer.ggml.tokens")
        if tokens is None:
            raise UnsupportedModelError(f"{path.name} holds no tokenizer (tokenizer.ggml.tokens)")
        named_ends = [value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        types = [TokenType(kind) for kind in value("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))]
        by_name = [i for i, token in enumerate(tokens) if token in _END_TEXTS and types[i] != TokenType.NORMAL]
        for i in by_name:  # Some files call them user-defined.
            types[i] = TokenType.CONTROL
        return cls(
            model=value("tokenizer.ggml.model", "none"),
            pre=value("tokenizer.ggml.pre"),
            tokens=tokens,
            types=types,
            merges=value("tokenizer.ggml.merges", []),
            scores=value("tokenizer.ggml.scores", []),
            bos_id=value("tokenizer.ggml.bos_token_id"),
            eos_id=value("tokenizer.ggml.eos_token_id"),
            unknown_id=value("tokenizer.ggml.unknown_token_id"),
            end_ids=tuple(dict.fromkeys(i for i in (*named_ends, *by_name) if i is not None)),
            add_bos=value("tokenizer.ggml.add_bos_token"),
            add_space_prefix=value("tokenizer.ggml.add_space_prefix", True),
            chat_template=value("tokenizer.chat_template"),
        )

    @property
    def num_used(self) -> int:
        """Tokens up to the last that means anything: models pad their vocabulary to a round number."""
        unused = 0
        while self.types[len(self.types) - 1 - unused] == TokenType.UNUSED:
            unused += 1
        return len(self.types) - unused

    def of_type(self, *types: TokenType) -> Iterator[str]:
        """Texts of the tokens of these types, in the order of their ids."""
        return (token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types)


def write_gguf_tokenizer(gguf_path: Path, directory: Path) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` into the directory.

    Raises `UnsupportedModelError`, naming it, for a tokenizer model or a pre-tokenizer that we don't know.
    """
    source = GgufTokenizer.read(gguf_path)
    tokenizer, add_bos_by_default = _build(source)
    tokenizer.save(str(directory / "tokenizer.json"))
    add_bos = add_bos_by_default if source.add_bos is None else source.add_bos
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _text(source, source.bos_id),
        "eos_token": _text(source, source.eos_id),
        "add_bos_token": bool(add_bos and source.bos_id is not None),
        "clean_up_tokenization_spaces": False,
        "chat_template": source.chat_template,
    }
    _write_json(directory / "tokenizer_config.json", {key: item for key, item in config.items() if item is not None})
    _write_json(
        directory / "generation_config.json", {"bos_token_id": source.bos_id, "eos_token_id": list(source.end_ids)}
    )


def _build(source: GgufTokenizer) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether a text begins with BOS where the file does not say."""
    if source.model == "gpt2":
        return _byte_level(source)
    if source.model == "llama":
        return _sentencepiece(source), True
    raise UnsupportedModelError(f"tokenizer model {source.model!r} is not known; known: gpt2, llama")


def _byte_level(source: GgufTokenizer) -> tuple[Tokenizer, bool]:
    pre = PRE_TOKENIZERS.get(source.pre or "")
    if pre is None:
        raise UnsupportedModelError(f"pre-tokenizer {source.pre!r} is not known; known: {', '.join(PRE_TOKENIZERS)}")
    vocabulary = {token: i for i, token in enumerate(source.tokens[: source.num_used])}
    merges = [_pair(merge) for merge in source.merges]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            *_around_missing_bytes(vocabulary),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, source)
    return tokenizer, pre.add_bos


def _around_missing_bytes(vocabulary: Mapping[str, int]) -> list[pre_tokenizers.PreTokenizer]:
    """Bytes that a vocabulary lacks (SmolLM's) are left out of the ids; their neighbours don't merge over the gap."""
    missing = [character for character in pre_tokenizers.ByteLevel.alphabet() if character not in vocabulary]
    if not missing:
        return []
    return [pre_tokenizers.Split(Regex(f"[{''.join(map(re.escape, sorted(missing)))}]"), "isolated")]


def _sentencepiece(source: GgufTokenizer) -> Tokenizer:
    """SentencePiece's byte-pair model: merges follow from the scores, unknown characters fall back to bytes."""
    vocabulary = {token: i for i, token in enumerate(source.tokens[: source.num_used])}
    unknown = _text(source, source.unknown_id)
    model = models.BPE(
        vocabulary, _merges_by_score(source), unk_token=unknown, fuse_unk=True, byte_fallback=True, ignore_merges=False
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", "▁")
    prefixed = [normalizers.Prepend("▁"), spaces] if source.add_space_prefix else [spaces]
    tokenizer.normalizer = normalizers.Sequence(prefixed)
    unprefix = [decoders.Strip(" ", 1, 0)] if source.add_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *unprefix]
    )
    _add_special_tokens(tokenizer, source)
    return tokenizer


def _merges_by_score(source: GgufTokenizer) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best score of the third first (SentencePiece keeps no merge list)."""
    mergeable = {
        token: i
        for i, (token, kind) in enumerate(zip(source.tokens, source.types, strict=True))
        if kind in (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    }
    ranked = []
    for token, i in mergeable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-source.scores[i], i, left, right))
    return [(left, right) for _, _, left, right in sorted(ranked, key=lambda entry: entry[:2])]


def _add_special_tokens(tokenizer: Tokenizer, source: GgufTokenizer) -> None:
    # Control tokens are asked for by name only; user-defined ones are ordinary text that is never cut.
    control = source.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    whole = source.of_type(TokenType.USER_DEFINED)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in whole])


def _pair(merge: str) -> tuple[str, str]:
    # A byte-level token never holds a space, but it may start with one that was kept raw: cut at the first after it.
    cut = merge.index(" ", 1)
    return merge[:cut], merge[cut + 1 :]


def _text(source: GgufTokenizer, token_id: int | None) -> str | None:
    return None if token_id is None else source.tokens[token_id]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
