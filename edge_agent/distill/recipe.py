"""The whole way from a target to its draft head, in stages that each go on where they were stopped.

In the working folder: prompts.jsonl, answers/ (shards), training.pt (the latest checkpoint), evaluation/ (shards).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from edge_agent.distill.answers import AnswerLimits, answer_prompts
from edge_agent.distill.curve_plot import CurvePoint
from edge_agent.distill.evaluation import Acceptance, measure_acceptance, read_prompts
from edge_agent.distill.head_module import HeadModule
from edge_agent.distill.initial_head import continued_head, initial_head, projection_rows
from edge_agent.distill.moved_head import moved_head
from edge_agent.distill.prompts import Prompt, PromptBook
from edge_agent.distill.shards import Record, ShardFolder
from edge_agent.distill.shipped_text import TextRoots, shipped_pools
from edge_agent.distill.torch_target import TorchTarget
from edge_agent.distill.trainer import Report, Trainer, TrainingPlan
from edge_agent.distill.training_data import is_held_out
from edge_agent.distill.trimmed_vocabulary import TrimmedVocabulary, extended_vocabulary, trim_vocabulary
from shared.errors import ConfigError
from shared.models.cache import write_atomically
from shared.models.head import (
    HeadManifest,
    HeadSpec,
    HeadWeights,
    open_head,
    read_head_manifest,
    read_head_weights,
    write_head,
)
from shared.models.progress import ProgressListener
from shared.models.target_embedding import TargetEmbedding
from shared.tokenizer import Tokenizer

TOKENS_A_PROMPT: Final = 60
"""Answer tokens that prompts bring on average, at the very least: how many are composed."""
EVALUATED_TOKENS: Final = 128
"""Of each answer, at most."""
EVALUATED_CONTEXT: Final = 2048
"""A prompt that doesn't fit with its answers is left out."""
CURVE_PARTS: Final = (8, 4, 2)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what head comes out."""

    num_answer_tokens: int = 500_000
    max_answer: int = 256
    context_length: int = 1024
    sampled_share: float = 0.15
    """Part of the prompts that are answered by chance, at temperature 0.7, instead of greedily."""
    max_ids: int = 16_384
    seed: int = 1
    plan: TrainingPlan = field(default_factory=TrainingPlan)
    start_from: Path | None = None
    """A head's directory to train further; by default a head is made of the target's last layer."""
    made_for: Path | None = None
    """The built model that `start_from` was first made for, where that isn't the target."""


@dataclass(frozen=True)
class Machine:
    """What the work runs on. num_rows: conversations that a worker answers together."""

    device: torch.device
    num_rows: int
    num_workers: int

    @staticmethod
    def here(num_threads: int) -> Machine:
        """A GPU when there is one, else so many threads with work of their own: they never wait for one another."""
        if torch.cuda.is_available():
            return Machine(torch.device("cuda"), num_rows=512, num_workers=1)
        torch.set_num_threads(1)
        return Machine(torch.device("cpu"), num_rows=384, num_workers=num_threads)


@dataclass(frozen=True)
class Trained:
    """A head's weights and what is known of them; `untrained`: of the head that training began with."""

    weights: HeadWeights
    vocabulary: TrimmedVocabulary
    num_answer_tokens: int
    untrained: Report
    report: Report


class Distillation:
    """One target's head in the making."""

    def __init__(
        self, target: Path, folder: Path, recipe: Recipe, machine: Machine, progress: ProgressListener
    ) -> None:
        """target: a built model's directory. folder: where the work is kept.

        Raises:
            ModelFileError: a directory is not whole.
            UnsupportedModelError: another maker built the target, or the head to start from is another model's.
            TokenizerMismatchError: the head to start from counts in other tokens.
        """
        self.spec = HeadSpec.of_target(target)
        self._given, self._is_foreign = None, False
        if recipe.start_from is not None:
            self._is_foreign = read_head_manifest(recipe.start_from).target_sha256 != self.spec.target_sha256
            whose = recipe.made_for if self._is_foreign and recipe.made_for else target
            self._given = open_head(recipe.start_from, target=whose)
            self.spec = HeadSpec.of_head(self._given, target)
        self.recipe = recipe
        self._target, self._folder, self._machine, self._progress = target, folder, machine, progress

    def compose_prompts(self, roots: TextRoots, own: Mapping[str, Sequence[str]] | None = None) -> list[Prompt]:
        """The prompts, composed once and then read again. own: pools beside those that the machine ships."""
        file = self._folder / "prompts.jsonl"
        if not file.exists():
            self._progress("composing prompts", 0, 0)
            recipe = self.recipe
            book = PromptBook.load({**shipped_pools(roots, recipe.seed), **(own or {})})
            count = max(64, recipe.num_answer_tokens // TOKENS_A_PROMPT)
            made = book.compose(count, recipe.seed, recipe.sampled_share)
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, "".join(prompt.model_dump_json() + "\n" for prompt in made).encode())
        return [Prompt.model_validate_json(line) for line in file.read_text(encoding="utf-8").splitlines()]

    def answer(self, prompts: Sequence[Prompt]) -> list[Record]:
        """All records, once the target has answered as much as the recipe wants."""
        recipe, machine = self.recipe, self._machine
        limits = AnswerLimits(
            recipe.num_answer_tokens, recipe.max_answer, min(machine.num_rows, len(prompts)), machine.num_workers
        )
        return self._answered(prompts, ShardFolder(self._folder / "answers"), limits, recipe.context_length)

    def train(self, records: Sequence[Record], name: str = "training") -> Trained:
        """A head trained on these records. Its checkpoint in the folder has this name.

        Raises:
            ConfigError: too few records.
        """
        device, spec, plan = self._machine.device, self.spec, self.recipe.plan
        learned = [record for record in records if not is_held_out(record, plan.held_out)]
        if not learned or len(learned) == len(records):
            raise ConfigError(
                f"{len(records)} answers are too few to train on some and hold others out: choose more --answer-tokens"
            )
        vocabulary = self._vocabulary(learned)
        trainer = Trainer(
            HeadModule(self._first_weights(vocabulary.ids, learned), spec),
            TargetEmbedding(self._target),
            projection_rows(self._target, vocabulary.ids),
            records,
            replace(plan, num_workers=self._machine.num_workers),
            seed=self.recipe.seed,
            device=device,
        )
        untrained = trainer.evaluate()
        self._folder.mkdir(parents=True, exist_ok=True)
        trainer.train(self._folder / f"{name}.pt", self._progress)
        count = sum(record.num_answer_tokens for record in learned)
        return Trained(trainer.head.weights(), vocabulary, count, untrained, trainer.evaluate())

    def export(self, trained: Trained, directory: Path) -> HeadManifest:
        """Write the head's directory, 4 bits a weight."""
        self._progress("quantising the head", 0, 0)
        return write_head(directory, trained.weights, self.spec)

    def evaluate(self, head: Path, file: Path, num_threads: int) -> dict[str, Acceptance]:
        """Greedy acceptance by category on the target's answers to the prompts of a file.

        Raises:
            ConfigError: the file holds no prompts.
        """
        prompts = read_prompts(file)
        limits = AnswerLimits(None, EVALUATED_TOKENS, min(self._machine.num_rows, len(prompts)), 1)
        records = self._answered(prompts, ShardFolder(self._folder / "evaluation"), limits, EVALUATED_CONTEXT)
        self._progress("measuring acceptance", 0, 0)
        return measure_acceptance(
            head,
            self._target,
            records,
            lambda record: prompts[record.prompt_index].kind,
            num_threads=num_threads,
            context_length=EVALUATED_CONTEXT,
        )

    def learning_curve(self, records: Sequence[Record], whole: Trained) -> list[CurvePoint]:
        """Heads trained on an eighth, a quarter and half of the records, and the whole one, on what is held out."""
        points = []
        for part in CURVE_PARTS:
            held_out = [record for record in records if is_held_out(record, self.recipe.plan.held_out)]
            learned = [record for record in records if not is_held_out(record, self.recipe.plan.held_out)]
            trained = self.train([*learned[: len(learned) // part], *held_out], f"training-{part}")
            points.append(CurvePoint(trained.num_answer_tokens, trained.report.acceptance))
        return [*points, CurvePoint(whole.num_answer_tokens, whole.report.acceptance)]

    def _vocabulary(self, learned: Sequence[Record]) -> TrimmedVocabulary:
        """The commonest ids; a moved head keeps those it has, and gets others if the model is there whose rows fit."""
        vocab_size, max_ids = self.spec.vocab_size, self.recipe.max_ids
        if self._given is None or not self.spec.is_moved:
            return trim_vocabulary(learned, vocab_size, max_ids)
        return extended_vocabulary(
            self._given.vocabulary, learned, vocab_size, 0 if self.recipe.made_for is None else max_ids
        )

    def _first_weights(self, ids: npt.NDArray[np.int32], learned: Sequence[Record]) -> HeadWeights:
        given, made_for = self._given, self.recipe.made_for
        if given is None:
            self._progress("making a head of the target's last layer", 0, 0)
            return initial_head(self._target, self.spec, ids, learned)
        if not self.spec.is_moved:
            return continued_head(self._target, given, ids)
        if self._is_foreign and made_for is not None:
            self._progress("fitting the head to the target's features", 0, 0)
            weights = moved_head(given, made_for, self._target, learned, self._machine.num_workers)
        else:
            weights = read_head_weights(given)
        if made_for is None:
            return weights
        return replace(weights, lm_head=projection_rows(made_for, ids).numpy(), vocabulary=ids)

    def _answered(
        self, prompts: Sequence[Prompt], folder: ShardFolder, limits: AnswerLimits, context_length: int
    ) -> list[Record]:
        records = list(folder.records())
        wanted = limits.num_answer_tokens
        done = sum(record.num_answer_tokens for record in records)
        if (len(records) >= len(prompts)) if wanted is None else (done >= wanted):
            return records
        self._progress("loading the target", 0, 0)
        answer_prompts(
            prompts,
            folder,
            TorchTarget(self._target, context_length, limits.num_rows, self._machine.device),
            Tokenizer.from_directory(self._target),
            limits,
            seed=self.recipe.seed,
            progress=self._progress,
        )
        return list(folder.records())
