"""Text to token ids and back, the same for the models we build and for directories made by others."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as HfTokenizer

from shared.errors import ModelFileError, UnsupportedModelError
from shared.memory import release_freed_memory
from shared.models.gguf_tokenizer import write_gguf_tokenizer

_SPACE_MARK: Final = "▁"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def write_tokenizer(gguf_path: Path, directory: Path) -> str:
    """Writes the GGUF's tokenizer into the directory and returns its fingerprint.

    The files are `tokenizer.json`, `tokenizer_config.json` (bos, eos, chat template) and `generation_config.json` (all
    ids that end an answer). Raises `UnsupportedModelError` for a tokenizer that we don't know.
    """
    write_gguf_tokenizer(gguf_path, directory)
    return Tokenizer.from_directory(directory).fingerprint


class Tokenizer:
    """Encodes and decodes with one vocabulary. Immutable after construction, so threads may share it."""

    def __init__(
        self,
        definition: Mapping[str, Any],
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool = False,
        chat_template: str | None = None,
        vocab_size: int = 0,
    ) -> None:
        """`definition` is the content of a `tokenizer.json`; `vocab_size` counts padded ids that it leaves out."""
        self._tokenizer = _plain(definition)
        self._continuing = _without_prefix(definition) or self._tokenizer
        controls = [entry for entry in definition["added_tokens"] if entry["special"]]
        self._added = {entry["id"]: entry["content"] for entry in definition["added_tokens"]}
        self._control_ids: dict[str, int] = {entry["content"]: entry["id"] for entry in controls}
        self._split_controls = _split_pattern(controls)
        self._byte_of = _bytes_by_character() if _is_byte_level(definition) else None
        self.special_ids: frozenset[int] = frozenset(self._control_ids.values())
        self.special_tokens: frozenset[str] = frozenset(self._control_ids)
        self.bos_token = bos_token
        self.bos_id: int | None = None if bos_token is None else self._tokenizer.token_to_id(bos_token)
        self.eos_token = eos_token
        """The token that a template writes at the end of an answer, of all that may end one."""
        self.eos_ids: frozenset[int] = frozenset(eos_ids)
        self.add_bos = add_bos and self.bos_id is not None
        self.chat_template = chat_template
        self.strips_first_space = _strips_first_space(definition["decoder"] or {})
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(vocab_size, 1 + max(vocabulary.values()))
        self.fingerprint = _fingerprint(definition, vocabulary)
        """SHA-256 over everything that decides which ids a text becomes and what an id means.

        Equal for two models of different size that share a vocabulary, different for two vocabularies of one size with
        swapped entries. Padding of the vocabulary does not count.
        """

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Loads `tokenizer.json` and what stands beside it.

        Raises `ModelFileError` when a file is missing or no JSON, `UnsupportedModelError` for a layout we can't decode.
        """
        definition = _read_json(directory / "tokenizer.json")
        if definition is None:
            raise ModelFileError(f"{directory / 'tokenizer.json'} is missing")
        config = _read_json(directory / "tokenizer_config.json") or {}
        genai = (_read_json(directory / "genai_config.json") or {}).get("model", {})
        generation = _read_json(directory / "generation_config.json") or {}
        ids = {entry["content"]: entry["id"] for entry in definition["added_tokens"]}
        eos_token = _token_text(config.get("eos_token"))
        ends = [*_as_ids(genai.get("eos_token_id")), *_as_ids(generation.get("eos_token_id"))]
        if eos_token in ids:
            ends.append(ids[eos_token])
        tokenizer = cls(
            definition,
            bos_token=_token_text(config.get("bos_token")),
            eos_token=eos_token,
            eos_ids=ends,
            add_bos=bool(config.get("add_bos_token", False)),
            chat_template=_chat_template(config, directory),
            vocab_size=int(genai.get("vocab_size", 0)),
        )
        del definition  # Many times larger than what is kept of it.
        release_freed_memory()
        return tokenizer

    def encode(self, text: str, *, allow_special: bool = False, add_bos: bool = False) -> list[int]:
        """Token ids of the text.

        Text that spells a control token becomes that token only with `allow_special`, which is for a template's own
        text; without it no control id comes out, whatever the text says. `add_bos` puts BOS in front when the model
        asks for it and the text does not already begin with it.
        """
        ids: list[int] = []
        pieces = self.split_special(text) if allow_special else iter((text,))
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(self.encode_text(piece, first=not ids))
        if add_bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_text(self, text: str, *, first: bool = True) -> list[int]:
        """Ids of text that holds no control token; `first` tells whether it stands at the start of the prompt."""
        encoding = (self._tokenizer if first else self._continuing).encode(text, add_special_tokens=False)
        for token_id, (start, _) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self.special_ids:
                # Some vocabularies can merge characters into a control token: cut it open.
                return [
                    *self.encode_text(text[: start + 1], first=first),
                    *self.encode_text(text[start + 1 :], first=False),
                ]
        return list(encoding.ids)

    def split_special(self, text: str) -> Iterator[str | int]:
        """The text cut at its control tokens: strings of ordinary text and the ids between them."""
        position = 0
        for match in self._split_controls.finditer(text):
            if match.start() > position:
                yield text[position : match.start()]
            token = match[0] if match[0] in self._control_ids else match[0].strip()
            yield self._control_ids[token]
            position = match.end()
        if position < len(text):
            yield text[position:]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD.

        `continues` says that other text stands before it, so that a leading space is kept (some tokenizers put one in
        front of every text, and take it off again).
        """
        parts = (self.token_bytes(i) for i in ids if not (skip_special and i in self.special_ids))
        data = b"".join(parts)
        if self.strips_first_space and not continues:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to a text; none for an id that only pads the vocabulary."""
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_of is not None:
            return _byte_level_bytes(piece, self._byte_of)
        byte = _BYTE_TOKEN.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else str(piece).replace(_SPACE_MARK, " ").encode()


def _fingerprint(definition: Mapping[str, Any], vocabulary: Mapping[str, int]) -> str:
    model = definition["model"]
    content = [
        model.get("type"),
        sorted((i, token) for token, i in vocabulary.items()),
        sorted(entry["id"] for entry in definition["added_tokens"] if entry["special"]),
        [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges", [])],
        model.get("ignore_merges", False),
        definition["normalizer"],
        definition["pre_tokenizer"],
    ]
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(definition: Mapping[str, Any]) -> HfTokenizer:
    """A tokenizer that takes every text for text: control tokens are split off by us."""
    try:
        tokenizer = HfTokenizer.from_str(json.dumps(definition))
    except Exception as error:  # The library raises nothing more precise.
        raise UnsupportedModelError(f"tokenizer.json can't be loaded: {error}") from error
    tokenizer.encode_special_tokens = True
    return tokenizer


def _without_prefix(definition: Mapping[str, Any]) -> HfTokenizer | None:
    """For text after a control token, where the tokenizer marks only the very first word of a prompt."""
    pre = definition["pre_tokenizer"] or {}
    if pre.get("type") != "Metaspace" or pre.get("prepend_scheme") != "first":
        return None
    return _plain({**definition, "pre_tokenizer": {**pre, "prepend_scheme": "never"}})


def _split_pattern(controls: Iterable[Mapping[str, Any]]) -> re.Pattern[str]:
    """Finds control tokens, the longest first, each with the blanks around it that it swallows."""
    longest_first = sorted(controls, key=lambda entry: len(entry["content"]), reverse=True)
    alternatives = (
        (r"\s*" if entry["lstrip"] else "") + re.escape(entry["content"]) + (r"\s*" if entry["rstrip"] else "")
        for entry in longest_first
    )
    return re.compile("|".join(alternatives) or r"(?!)")


def _is_byte_level(definition: Mapping[str, Any]) -> bool:
    """Whether pieces spell bytes; else they spell text with a mark for spaces. Any other layout is refused by name."""
    decoder = definition["decoder"] or {}
    steps = {step["type"] for step in decoder.get("decoders", [decoder]) if step}
    if "ByteLevel" in steps:
        return True
    if steps and steps <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return False
    raise UnsupportedModelError(f"tokenizer decoder {decoder.get('type')!r} is not known; known: ByteLevel, Metaspace")


def _strips_first_space(decoder: Mapping[str, Any]) -> bool:
    steps = decoder.get("decoders", [decoder])
    return any(
        (step.get("type") == "Strip" and step.get("start", 0) > 0)
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )


def _bytes_by_character() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _byte_level_bytes(piece: str, byte_of: Mapping[str, int]) -> bytes:
    try:
        return bytes(byte_of[character] for character in piece)
    except KeyError:  # Not spelled in bytes, as added tokens are: it stands for its own text.
        return piece.encode()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ModelFileError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{path} holds no JSON object")
    return content


def _token_text(entry: str | Mapping[str, Any] | None) -> str | None:
    """A token in `tokenizer_config.json`: its text, or an object around it."""
    return entry["content"] if isinstance(entry, Mapping) else entry


def _as_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _chat_template(config: Mapping[str, Any], directory: Path) -> str | None:
    """The template in the configuration (one, or named ones of which `default` counts) or in a file of its own."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    if template is None and (directory / "chat_template.jinja").is_file():
        template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    return template
