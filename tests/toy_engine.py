"""A whole engine around toy models: real tokenizer, template, sessions, caches and thread; the logits are made up"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edge_agent.config import EdgeSettings
from edge_agent.controller import FixedPolicy
from edge_agent.drafters import AnswerPool
from edge_agent.engine import Engine, LocalModel
from shared.causal_lm import CausalLM, Logits
from shared.chat_template import ChatTemplate
from shared.inference_thread import InferenceThread
from shared.kv_slots import SlotPool
from shared.tokenizer import Tokenizer
from tests.fakes import TableLM

END = "<|im_end|>"
START = "<|im_start|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL_NAME = "toy"


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are bytes; two control tokens follow."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}
    controls = [
        {"id": 256 + n, "content": content, "special": True}
        | {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for n, content in enumerate([START, END])
    ]
    definition: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": controls,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {spelled[byte]: byte for byte in range(256)},
            "merges": [],
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
        },
    }
    return Tokenizer(definition, eos_ids=[257])


class Script:
    """What a toy model says, and how: the dials that tests turn while it runs."""

    def __init__(self, answer: str = "Hello, world!", *, ends: bool = True, pause_s: float = 0.0) -> None:
        self.ids = [*answer.encode(), *([257] if ends else [])]
        self.pause_s = pause_s
        self.fail_after: int | None = None
        self.num_rows = 0
        self.gate = threading.Event()
        self.gate.set()


class ScriptLM:
    """Says a script after the last `assistant` header, or after the whole first feed of a plain prompt, on and on."""

    vocab_size = 258

    def __init__(self, script: Script, context_length: int = 256) -> None:
        self.context_length = context_length
        self.tokens: list[int] = []
        self._script = script

    def forward(self, tokens: Sequence[int], num_logits: int) -> Logits:
        self._script.gate.wait(30)
        time.sleep(self._script.pause_s)
        self.tokens.extend(tokens)
        self._script.num_rows += num_logits
        if self._script.fail_after is not None and self._script.num_rows > self._script.fail_after:
            raise RuntimeError("the toy broke")
        end = len(self.tokens)
        return np.array([self._row(end - num_logits + i + 1) for i in range(num_logits)]).reshape(-1, self.vocab_size)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]

    def _row(self, length: int) -> np.ndarray:
        header = [256, *b"assistant\n"]
        start = next((i for i in range(length, 0, -1) if self.tokens[i - len(header) : i] == header), 0)
        row = np.full(self.vocab_size, -40.0)
        row[self._script.ids[(length - start) % len(self._script.ids)]] = 0.0
        return row


def toy_engine(
    new_lm: Callable[[], CausalLM],
    *,
    gamma: int = 3,
    max_slots: int = 8,
    context_length: int = 256,
    chat: bool = True,
    pool: AnswerPool | None = None,
) -> Engine:
    """An engine that drafts by n-grams, `gamma` tokens a round."""
    model = LocalModel(MODEL_NAME, byte_tokenizer(), SlotPool(new_lm, max_slots), context_length, 0)
    return Engine(
        model,
        None,
        InferenceThread(),
        FixedPolicy(gamma),
        ChatTemplate(TEMPLATE if chat else None, None, END),
        "fp_toy",
        pool,
    )


def script_engine(
    script: Script,
    *,
    gamma: int = 3,
    max_slots: int = 8,
    context_length: int = 256,
    pool: AnswerPool | None = None,
) -> Engine:
    """An engine that says a script."""
    return toy_engine(
        lambda: ScriptLM(script, context_length),
        gamma=gamma,
        max_slots=max_slots,
        context_length=context_length,
        pool=pool,
    )


def table_engine(*, seed: int = 5, gamma: int = 3, max_slots: int = 8, sharpness: float = 4.0) -> Engine:
    """An engine that babbles: random but exact logits."""
    return toy_engine(
        lambda: TableLM(258, seed, sharpness=sharpness, context_length=256), gamma=gamma, max_slots=max_slots
    )


def toy_settings(**values: Any) -> EdgeSettings:
    """Settings of a test's agent: a free port, nothing downloaded."""
    defaults: dict[str, Any] = {"port": 0, "target": MODEL_NAME, "draft": "none", "context_length": 256}
    return EdgeSettings(**defaults | values)
