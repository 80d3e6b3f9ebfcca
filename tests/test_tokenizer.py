"""Ids equal to llama.cpp's, control tokens never out of content, fingerprints that tell vocabularies apart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ModelFileError, UnsupportedModelError
from shared.models.gguf_tokenizer import PRE_TOKENIZERS
from shared.tokenizer import Tokenizer, write_tokenizer
from tests.llama_reference import LlamaReference
from tests.tiny_gguf import TinyVocabulary, sentencepiece_vocabulary, vocabulary_of, write_tiny_gguf

CORPUS = (
    "def f(x):\n    if x>=10:\n\t\treturn  x**2 # don't\n\n\n    print(f'{x!r:>8}')\r\n",
    "for(int i=0;i<n;++i){sum+=a[i]*0x1F3e-7;}//TODO\n\n}\n",
    "I'M sure they'Ve said we'll; it'ſ odd. 'S 'd",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 😀😀 ☎️ 1️⃣ 🇨🇭",
    "你好，世界！これはテストです。한국어 텍스트 １２３",
    "مرحبا بالعالم ١٢٣ שלום עולם हिन्दी में लिखा ไทย",
    "e\u0301 n\u0303 a\u0308\u0323 Å \u0301x é",
    "a  b   c    d\t\te \u00a0\u3000f\u2003g\u200bh\u2028i\u2029j\u0085k   ",
    "\n\n\n   \n \n\t\n  x\r\n\r\n  y\r z \x0b\x0c\x1c\x1f ",
    "1234567890 3.14159 1,000,000 ²½Ⅷ 0b1010 v1.2.3",
    "\x00\x01\x7f\ufeff\ufffd\U000e0001\U00042019\U00042019\U0010ffff",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><tool_call>{}</tool_call> <|im_ <|x|> |> <repo_name>",
    " ",
    "",
)

PIECES = [
    *"abXYZ \t\n\r'’.,!?-_0129²½٣éßſ",
    *("'s", "'LL", "  ", "    ", "\n\n", "\u00a0", "\u2028", "\u0085", "\u3000", "\u200d", "\u0301", "▁"),
    *("😀", "👩‍👩‍👧", "你好", "한국", "مرحبا", "हि", "\x1c", "\ufeff", "\U00042019", "hello", " the", "<0x0A>"),
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<tool_call>",
        "<repo_name>",
        "<s>",
        "<unk>",
        "<|",
        "|>",
        "<tool>",
    ),
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.characters(exclude_categories=["Cs"]), max_size=30).map("".join)


class Pair:
    """Our tokenizer and llama.cpp's for one GGUF."""

    def __init__(self, gguf_path: Path, directory: Path) -> None:
        self.directory = directory
        self.fingerprint = write_tokenizer(gguf_path, directory)
        self.ours = Tokenizer.from_directory(directory)
        self.theirs = LlamaReference(gguf_path)

    def check(self, text: str) -> None:
        for allow_special in (False, True):
            expected = self.theirs.encode(text, allow_special=allow_special)
            assert self.ours.encode(text, allow_special=allow_special) == expected, (text, allow_special)
        expected = self.theirs.encode(text, add_bos=True)
        assert self.ours.encode(text, add_bos=True) == expected, text


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(smollm2_gguf, tmp_path_factory.mktemp("smollm2"))
    yield pair
    pair.theirs.close()


@pytest.fixture(scope="module")
def byte_level(smollm2_gguf: Path) -> TinyVocabulary:
    return vocabulary_of(smollm2_gguf)


@pytest.mark.parametrize("text", CORPUS)
def test_smollm2_ids_are_llama_cpps(smollm2: Pair, text: str) -> None:
    smollm2.check(text)


@settings(max_examples=300)
@given(TEXTS)
def test_smollm2_ids_are_llama_cpps_on_any_text(smollm2: Pair, text: str) -> None:
    smollm2.check(text)


@pytest.mark.parametrize("pre", [name for name in PRE_TOKENIZERS if name != "qwen3"])
def test_every_pre_tokenizer_cuts_as_llama_cpp(byte_level: TinyVocabulary, pre: str, tmp_path: Path) -> None:
    pair = Pair(write_tiny_gguf(tmp_path / "tiny.gguf", byte_level.with_pre(pre)), tmp_path)
    try:
        settings(max_examples=60)(given(TEXTS)(pair.check))()
        for text in CORPUS:
            pair.check(text)
    finally:
        pair.theirs.close()


@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_sentencepiece_ids_are_llama_cpps(add_space_prefix: bool, tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary("\n".join(CORPUS[:5]) * 3, 600, add_space_prefix=add_space_prefix)
    pair = Pair(write_tiny_gguf(tmp_path / "tiny.gguf", vocabulary), tmp_path)
    try:
        settings(max_examples=200)(given(TEXTS)(pair.check))()
        for text in CORPUS:
            pair.check(text)
            assert pair.ours.decode(pair.ours.encode(text)) == text
    finally:
        pair.theirs.close()


@pytest.mark.model
@pytest.mark.slow
def test_qwen_ids_are_llama_cpps(qwen05_gguf: Path, tmp_path: Path) -> None:
    pair = Pair(qwen05_gguf, tmp_path)
    try:
        settings(max_examples=300)(given(TEXTS)(pair.check))()
        for text in CORPUS:
            pair.check(text)
    finally:
        pair.theirs.close()


def test_an_unknown_pre_tokenizer_is_refused_by_name(byte_level: TinyVocabulary, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", byte_level.with_pre("tekken"))
    with pytest.raises(UnsupportedModelError, match=r"'tekken'.*smollm.*qwen2.*llama-bpe"):
        write_tokenizer(path, tmp_path)


def test_an_unknown_tokenizer_model_is_refused_by_name(byte_level: TinyVocabulary, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", replace(byte_level, model="rwkv"))
    with pytest.raises(UnsupportedModelError, match="'rwkv'"):
        write_tokenizer(path, tmp_path)


def test_bos_is_added_once(byte_level: TinyVocabulary, tmp_path: Path) -> None:
    vocabulary = replace(byte_level, add_bos=True, bos_id=1)
    write_tokenizer(write_tiny_gguf(tmp_path / "tiny.gguf", vocabulary), tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    once = tokenizer.encode("Hello", add_bos=True)
    again = tokenizer.encode("<|im_start|>Hello", allow_special=True, add_bos=True)
    assert once == again
    assert once[0] == tokenizer.bos_id
    assert once[1:] == tokenizer.encode("Hello")


@given(TEXTS)
def test_content_never_becomes_a_control_token(smollm2: Pair, text: str) -> None:
    assert smollm2.ours.special_ids.isdisjoint(smollm2.ours.encode(text))


def test_smollm2_knows_its_ends(smollm2: Pair) -> None:
    ours = smollm2.ours
    assert ours.eos_ids == {0, 2}
    assert (ours.bos_id, ours.add_bos, ours.vocab_size) == (1, False, 49152)
    assert ours.special_ids == set(range(17))
    assert ours.encode("<|im_end|>", allow_special=True) == [2]


def test_text_survives_the_way_there_and_back(smollm2: Pair) -> None:
    for text in CORPUS[:-5]:
        ids = smollm2.ours.encode(text)
        assert smollm2.ours.decode(ids) == text
        assert b"".join(map(smollm2.ours.token_bytes, ids)) == text.encode()


def test_decode_leaves_control_tokens_out_unless_asked(smollm2: Pair) -> None:
    ids = smollm2.ours.encode("<|im_start|>hi<|im_end|>", allow_special=True)
    assert smollm2.ours.decode(ids) == "hi"
    assert smollm2.ours.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"
    assert smollm2.ours.token_bytes(10**6) == b""


def test_a_continuation_keeps_its_first_space(tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary("Hello world! Hello again\n" * 9, 300)
    write_tokenizer(write_tiny_gguf(tmp_path / "tiny.gguf", vocabulary), tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    ids = tokenizer.encode("Hello world!")
    assert tokenizer.decode(ids) == "Hello world!"
    assert tokenizer.decode(ids, continues=True) == " Hello world!"


def _edited(directory: Path, copy: Path, edit: str) -> Tokenizer:
    shutil.copytree(directory, copy)
    definition = json.loads((copy / "tokenizer.json").read_text())
    vocabulary = definition["model"]["vocab"]
    if edit == "swap two entries":
        vocabulary["ab"], vocabulary["ad"] = vocabulary["ad"], vocabulary["ab"]
    elif edit == "swap two merges":
        merges = definition["model"]["merges"]
        merges[100], merges[200] = merges[200], merges[100]
    elif edit == "drop a control token":
        definition["added_tokens"] = definition["added_tokens"][1:]
    elif edit == "cut words otherwise":
        definition["pre_tokenizer"]["pretokenizers"].pop(0)
    (copy / "tokenizer.json").write_text(json.dumps(definition))
    return Tokenizer.from_directory(copy)


@pytest.mark.parametrize("edit", ["swap two entries", "swap two merges", "drop a control token", "cut words otherwise"])
def test_the_fingerprint_changes_with_the_vocabulary(smollm2: Pair, tmp_path: Path, edit: str) -> None:
    edited = _edited(smollm2.directory, tmp_path / "edited", edit)
    assert edited.vocab_size == smollm2.ours.vocab_size
    assert edited.fingerprint != smollm2.fingerprint


def test_the_fingerprint_is_of_the_content_not_of_the_file(smollm2: Pair, tmp_path: Path) -> None:
    assert _edited(smollm2.directory, tmp_path / "copy", "nothing").fingerprint == smollm2.fingerprint


def test_padding_of_the_vocabulary_does_not_change_the_fingerprint(byte_level: TinyVocabulary, tmp_path: Path) -> None:
    padded = replace(
        byte_level,
        tokens=[*byte_level.tokens, *(f"[PAD{n}]" for n in range(9))],
        types=[*byte_level.types, *[5] * 9],
    )
    fingerprints = []
    for name, vocabulary in (("plain", byte_level), ("padded", padded)):
        directory = tmp_path / name
        directory.mkdir()
        fingerprints.append(write_tokenizer(write_tiny_gguf(directory / "tiny.gguf", vocabulary), directory))
    assert fingerprints[0] == fingerprints[1]


def test_a_directory_made_by_others_loads(smollm2: Pair, tmp_path: Path) -> None:
    shutil.copy(smollm2.directory / "tokenizer.json", tmp_path)
    config = {"bos_token": {"content": "<|im_start|>", "lstrip": False}, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"eos_token_id": [0], "vocab_size": 49280}}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, {0, 2}, 49280)
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    assert tokenizer.fingerprint == smollm2.ours.fingerprint


def test_a_control_token_takes_the_blanks_that_belong_to_it(smollm2: Pair) -> None:
    definition = json.loads((smollm2.directory / "tokenizer.json").read_text())
    definition["added_tokens"][2] |= {"rstrip": True}
    tokenizer = Tokenizer(definition)
    assert tokenizer.encode("a<|im_end|> \n b", allow_special=True) == [
        *tokenizer.encode("a"),
        2,
        *tokenizer.encode("b"),
    ]


def test_only_the_first_word_is_marked_where_the_scheme_says_so() -> None:
    vocabulary = {"<s>": 0, "▁": 1, "a": 2, "▁a": 3}
    definition = {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": "<s>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
            | {"single_word": False}
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        "post_processor": None,
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [["▁", "a"]]},
    }
    tokenizer = Tokenizer(definition)
    assert tokenizer.encode("a<s>a", allow_special=True) == [3, 0, 2]


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is no JSON"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("part", "content", "expected"),
    [("model", {"type": "Magic"}, "can't be loaded"), ("decoder", {"type": "WordPiece"}, "'WordPiece' is not known")],
)
def test_a_tokenizer_of_an_unknown_kind_is_refused(
    smollm2: Pair, tmp_path: Path, part: str, content: dict[str, object], expected: str
) -> None:
    definition = json.loads((smollm2.directory / "tokenizer.json").read_text())
    definition[part] = content | ({"prefix": "##", "cleanup": True} if part == "decoder" else {})
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(UnsupportedModelError, match=expected):
        Tokenizer.from_directory(tmp_path)
