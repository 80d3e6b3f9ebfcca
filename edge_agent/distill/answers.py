"""The target's own answers, many conversations at a time, with its hidden state at every token of them.

Each worker thread steps its rows of a cache together; a row whose conversation ends takes the next prompt at once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from edge_agent.distill.prompts import Prompt
from edge_agent.distill.shards import SHARD_POSITIONS, Record, ShardFolder
from edge_agent.distill.torch_target import SPAN_ROWS, KeyValueCache, TorchTarget
from shared.acceptance import common_prefix_length
from shared.chat_template import ChatTemplate
from shared.models.progress import ProgressListener
from shared.tokenizer import Tokenizer

TEMPERATURE: Final = 0.7
TOP_K: Final = 64
LOOP_TOKENS: Final = 32
"""An answer that repeats so many tokens word for word has got stuck: more of it teaches nothing."""


@dataclass(frozen=True)
class AnswerLimits:
    """How much is answered, and how."""

    num_answer_tokens: int | None
    """None: all prompts are answered."""
    max_answer: int = 256
    """Tokens of one answer."""
    num_rows: int = 256
    """Conversations that a worker steps together."""
    num_workers: int = 1
    shard_positions: int = SHARD_POSITIONS


@dataclass
class Conversation:
    """A prompt being answered. The cache holds the first `len(states)` tokens."""

    prompt: Prompt
    random: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    is_answer: list[bool] = field(default_factory=list)
    states: list[npt.NDArray[np.float16]] = field(default_factory=list)  # [H] each
    messages: list[dict[str, Any]] = field(default_factory=list)
    answer_start: int = 0

    @property
    def answer(self) -> list[int]:
        """Tokens of the answer to the present turn so far."""
        return self.tokens[self.answer_start :]

    def record(self) -> Record:
        """What is kept of it."""
        count = len(self.tokens)
        states = np.stack(self.states[: count - 1])
        return Record(self.prompt.index, np.array(self.tokens, np.int32), np.array(self.is_answer, bool), states)


class AnswerQueue:
    """What the workers share: the prompts that are left, and the records until they fill a shard. Thread-safe."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        folder: ShardFolder,
        limits: AnswerLimits,
        progress: ProgressListener,
    ) -> None:
        """Prompts that have a record in the folder are left out, and its answers count."""
        answered: set[int] = set()
        self._done = 0
        for record in folder.records():
            answered.add(record.prompt_index)
            self._done += record.num_answer_tokens
        left = [prompt for prompt in prompts if prompt.index not in answered]
        self._classes = [iter(prompts) for prompts in by_length(left, max(1, limits.num_rows // SPAN_ROWS))]
        self._num_prompts, self._num_left = len(prompts), len(left)
        self._folder, self._limits, self._progress = folder, limits, progress
        self._held: list[Record] = []
        self._lock = threading.Lock()
        self._is_stopped = False

    @property
    def is_finished(self) -> bool:
        """Whether enough is answered, or the run was stopped."""
        wanted = self._limits.num_answer_tokens
        return self._is_stopped or (wanted is not None and self._done >= wanted)

    def take(self, length_class: int) -> Prompt | None:
        """The next prompt of this class, or of the nearest that has one; None when there is no need of another."""
        nearest = sorted(range(len(self._classes)), key=lambda other: abs(other - length_class))
        with self._lock:
            if self.is_finished:
                return None
            return next((prompt for other in nearest for prompt in self._classes[other]), None)

    def add(self, record: Record) -> None:
        """Keep a finished conversation; writes a shard when enough are there."""
        with self._lock:
            self._held.append(record)
            self._done += record.num_answer_tokens
            self._num_left -= 1
            self._progress("the target answers", self._fraction(), 1.0)
            if sum(len(held.tokens) for held in self._held) >= self._limits.shard_positions:
                self._write()

    def stop(self) -> None:
        """Let the workers end after the step that they are at."""
        self._is_stopped = True

    def flush(self) -> None:
        """Write what is finished."""
        with self._lock:
            self._write()

    def _fraction(self) -> float:
        by_prompts = 1 - self._num_left / self._num_prompts
        wanted = self._limits.num_answer_tokens
        return by_prompts if wanted is None else min(1.0, self._done / wanted)

    def _write(self) -> None:
        if self._held:
            self._folder.write(self._held)
            self._held = []


class Worker:
    """Steps the conversations of one cache."""

    def __init__(
        self,
        target: TorchTarget,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        queue: AnswerQueue,
        limits: AnswerLimits,
        seed: int,
    ) -> None:
        self._target, self._tokenizer, self._template = target, tokenizer, template
        self._queue, self._limits, self._seed = queue, limits, seed
        self._cache: KeyValueCache = target.new_cache(limits.num_rows)
        self._rows: list[Conversation | None] = [None] * limits.num_rows

    def run(self) -> None:
        """Answer until the queue is finished, or empty and every conversation has ended."""
        while not self._queue.is_finished:
            for row, conversation in enumerate(self._rows):
                if conversation is None:
                    self._rows[row] = self._begin(row)
            active = [row for row, conversation in enumerate(self._rows) if conversation is not None]
            if not active:
                break
            self._step(1 + active[-1])
        for conversation in self._rows:
            if conversation is not None:  # As far as it went: a part of an answer teaches as much as a whole one.
                self._queue.add(conversation.record())

    def _begin(self, row: int) -> Conversation | None:
        """Read the next prompt that fits into the context."""
        while (prompt := self._queue.take(row // SPAN_ROWS)) is not None:
            conversation = Conversation(prompt, np.random.default_rng([self._seed, prompt.index]))
            if self._ask(row, conversation, prompt.turns[0]):
                return conversation
        return None

    def _ask(self, row: int, conversation: Conversation, question: str) -> bool:
        """Put a turn to the target; False when the context has no room for it and an answer."""
        messages = [*conversation.messages, {"role": "user", "content": question}]
        ids = self._template.encode(self._tokenizer, messages)
        if len(ids) + self._limits.max_answer > self._target.context_length:
            return False
        kept = min(common_prefix_length(conversation.tokens, ids), len(conversation.states), len(ids) - 1)
        states = self._target.forward(self._cache, slice(row, row + 1), [ids[kept:]], [kept])[0]
        conversation.messages = messages
        conversation.tokens = ids
        conversation.is_answer = conversation.is_answer[:kept] + [False] * (len(ids) - kept)
        conversation.states[kept:] = list(states.half().cpu().numpy())
        conversation.answer_start = len(ids)
        self._choose(conversation, self._target.logits(states[-1:])[0])
        return True

    def _step(self, count: int) -> None:
        """One token for each conversation in the first `count` rows; a row without one is computed for nothing."""
        tokens = [[0 if held is None else held.tokens[-1]] for held in self._rows[:count]]
        lengths = [0 if held is None else len(held.states) for held in self._rows[:count]]
        states = self._target.forward(self._cache, slice(0, count), tokens, lengths)[:, 0]
        logits = self._target.logits(states)
        best = logits.max(-1).indices.tolist()  # Twice as quick as argmax in bfloat16.
        kept = states.half().cpu().numpy()
        for row, conversation in enumerate(self._rows[:count]):
            if conversation is None:
                continue
            conversation.states.append(kept[row].copy())
            self._choose(conversation, logits[row], best[row])
            if self._has_ended(conversation) and not self._ask_next(row, conversation):
                self._queue.add(conversation.record())
                self._rows[row] = None

    def _choose(self, conversation: Conversation, logits: torch.Tensor, best: int | None = None) -> None:
        if conversation.prompt.is_sampled:
            values, ids = logits.float().topk(min(TOP_K, len(logits)))
            noise = conversation.random.gumbel(size=len(values))
            token = int(ids[int(np.argmax(values.cpu().numpy() / TEMPERATURE + noise))])
        else:
            token = int(logits.argmax()) if best is None else best
        conversation.tokens.append(token)
        conversation.is_answer.append(True)

    def _has_ended(self, conversation: Conversation) -> bool:
        answer = conversation.answer
        if answer[-1] in self._tokenizer.eos_ids or len(answer) >= self._limits.max_answer:
            return True
        return len(answer) % LOOP_TOKENS == 0 and is_stuck(answer)

    def _ask_next(self, row: int, conversation: Conversation) -> bool:
        """Go on with the next turn, if there is one and room for it."""
        turn = len(conversation.messages) // 2 + 1
        if turn >= len(conversation.prompt.turns):
            return False
        said = [token for token in conversation.answer if token not in self._tokenizer.eos_ids]
        former = conversation.messages
        conversation.messages = [*former, {"role": "assistant", "content": self._tokenizer.decode(said)}]
        return self._ask(row, conversation, conversation.prompt.turns[turn])


def is_stuck(answer: Sequence[int]) -> bool:
    """Whether the end of the answer stood in it before, word for word."""
    tail = tuple(answer[-LOOP_TOKENS:])
    starts = range(len(answer) - LOOP_TOKENS)
    return any(tuple(answer[start : start + LOOP_TOKENS]) == tail for start in starts)


def answer_prompts(
    prompts: Sequence[Prompt],
    folder: ShardFolder,
    target: TorchTarget,
    tokenizer: Tokenizer,
    limits: AnswerLimits,
    *,
    seed: int,
    progress: ProgressListener,
) -> None:
    """Answer prompts until the folder holds enough answer tokens. Goes on where a former run stopped.

    Ends early, with what is finished written, on KeyboardInterrupt.
    """
    template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    queue = AnswerQueue(prompts, folder, limits, progress)
    workers = [Worker(target, tokenizer, template, queue, limits, seed) for _ in range(limits.num_workers)]
    try:
        with ThreadPoolExecutor(limits.num_workers) as pool:
            try:
                for running in [pool.submit(worker.run) for worker in workers]:
                    running.result()
            finally:
                queue.stop()
    finally:
        queue.flush()


def by_length(prompts: Sequence[Prompt], num_classes: int) -> list[list[Prompt]]:
    """As many classes, the shortest conversations first; within each the prompts' order stays.

    A class is answered by rows of its own. So rows that attend together are about equally long, and at any time each
    class has had the same number of tokens.
    """
    ranks = {prompt.index: rank for rank, prompt in enumerate(sorted(prompts, key=_expected_chars))}
    classes: list[list[Prompt]] = [[] for _ in range(num_classes)]
    for prompt in prompts:
        classes[ranks[prompt.index] * num_classes // len(prompts)].append(prompt)
    return classes


def _expected_chars(prompt: Prompt) -> int:
    return sum(map(len, prompt.turns)) + 600 * len(prompt.turns)
