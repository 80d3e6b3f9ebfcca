"""Training a head on recorded answers: AdamW on the unrolled cross-entropy, with checkpoints to go on from."""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256
from math import cos, pi
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from edge_agent.distill.distillation_loss import Projections, agreement, loss_slopes
from edge_agent.distill.head_module import HeadBatch, HeadModule
from edge_agent.distill.rounding import rounded_matrices
from edge_agent.distill.shards import Record
from edge_agent.distill.training_data import batches, is_held_out, to_batch
from shared.models.cache import write_atomically
from shared.models.head import HEAD_PRECISION
from shared.models.progress import ProgressListener
from shared.models.target_embedding import TargetEmbedding

REPORTED_DEPTH: Final = 3


@dataclass(frozen=True)
class TrainingPlan:
    """How a head is trained. Defaults: what served best for the shipped head (docs/head.md)."""

    epochs: int = 3
    peak_rate: float = 3e-4
    warm_up: float = 0.05
    """Part of all steps in which the rate rises to its peak; then it falls along a cosine."""
    weight_decay: float = 0.01
    depth_weights: tuple[float, ...] = (1.0, 0.8)
    batch_positions: int = 3072
    """Padded positions of one batch."""
    prompt_share: float = 0.0
    """Part of the conversations whose prompts are learned from too."""
    rounded_share: float = 0.4
    """Part of all steps, the last ones, whose gradients are those of the weights as export rounds them."""
    held_out: float = 0.03
    num_workers: int = 1
    """Threads; each computes a batch for every step."""


@dataclass(frozen=True)
class Report:
    """What the head does on records that it wasn't trained on: depth 1, 2 …; each given that those before agree."""

    step: int
    loss: float
    acceptance: tuple[float, ...]


class Trainer:
    """A head in training."""

    def __init__(
        self,
        head: HeadModule,
        embedding: TargetEmbedding,
        target_projection: Tensor,
        records: Sequence[Record],
        plan: TrainingPlan,
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        """target_projection [V, T]: the target's rows of the head's ids.

        The head's own aren't trained: they are a model's, so that the head learns such a model's states.
        """
        self.head, self.plan = head.to(device), plan
        self._embedding, self._device = embedding, device
        head.lm_head.requires_grad_(False)
        self._projections = Projections(
            target_projection.to(device, torch.bfloat16), head.lm_head.detach().to(torch.bfloat16)
        )
        self.held_out = [record for record in records if is_held_out(record, plan.held_out)]
        self._records = [record for record in records if not is_held_out(record, plan.held_out)]
        self._seed = seed
        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.dim() > 1]
        vectors = [parameter for parameter in trained if parameter.dim() == 1]
        self._trained = [*matrices, *vectors]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=plan.peak_rate,
            betas=(0.9, 0.95),
            weight_decay=plan.weight_decay,
            fused=True,
        )
        self._identity = _identity(plan, records, head)
        self.step = 0
        self.num_steps = plan.epochs * self._steps_of_epoch(0)

    def train(self, checkpoint: Path, progress: ProgressListener, *, save_every: int = 50) -> None:
        """All steps that are left after the checkpoint, which is kept up to date.

        A checkpoint of another plan or other records is of no use: training begins anew.
        """
        self._restore(checkpoint)
        steps = self._steps_of_epoch(0)
        with ThreadPoolExecutor(self.plan.num_workers) as pool:
            while self.step < self.num_steps:
                groups = self._groups(self.step // steps)
                self._learn(groups[self.step % steps], pool)
                self.step += 1
                progress("training", self.step / self.num_steps, 1.0)
                if self.step % save_every == 0 or self.step == self.num_steps:
                    self._save(checkpoint)

    @torch.no_grad()
    def evaluate(self) -> Report:
        """Loss and acceptance on the records that are held out, as they were answered (by greedy or by chance).

        Of the weights as they are, not as they are stored.
        """
        loss, accepted, reached = 0.0, np.zeros(REPORTED_DEPTH), np.zeros(REPORTED_DEPTH)
        for records in batches(self.held_out, self.plan.batch_positions, np.random.default_rng(0)):
            batch = to_batch(records, [False] * len(records), self._embedding, self._device)
            found = agreement(*self._unroll(batch, REPORTED_DEPTH), batch.states, self._projections)
            loss += found.loss
            accepted += found.accepted
            reached += found.reached
        rates = tuple(float(rate) for rate in accepted / np.maximum(1, reached))
        return Report(self.step, loss / max(1.0, float(reached[0])), rates)

    def _groups(self, epoch: int) -> list[list[list[Record]]]:
        """An epoch's batches, one a worker for each step; the last step of an epoch may have fewer."""
        random = np.random.default_rng([self._seed, epoch])
        made = batches(self._records, self.plan.batch_positions, random)
        size = self.plan.num_workers
        return [made[first : first + size] for first in range(0, len(made), size)]

    def _steps_of_epoch(self, epoch: int) -> int:
        return len(self._groups(epoch))

    def _learn(self, group: Sequence[Sequence[Record]], pool: ThreadPoolExecutor) -> None:
        random = np.random.default_rng([self._seed, self.step, 1])
        wholes = [(random.random(len(records)) < self.plan.prompt_share).tolist() for records in group]
        is_rounded = self.step >= (1 - self.plan.rounded_share) * self.num_steps
        with rounded_matrices(self.head, HEAD_PRECISION) if is_rounded else nullcontext():
            computed = list(pool.map(self._gradients, group, wholes))
        for parameter, *gradients in zip(self._trained, *computed, strict=True):
            parameter.grad = torch.stack(gradients).mean(0) if len(gradients) > 1 else gradients[0]
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        for settings in self._optimizer.param_groups:
            settings["lr"] = self._rate()
        self._optimizer.step()

    def _gradients(self, records: Sequence[Record], wholes: Sequence[bool]) -> tuple[Tensor, ...]:
        batch = to_batch(records, wholes, self._embedding, self._device)
        outputs, is_chained = self._unroll(batch, len(self.plan.depth_weights))
        slopes = loss_slopes(outputs, is_chained, batch.states, self._projections, self.plan.depth_weights)
        return torch.autograd.grad(outputs, self._trained, slopes)

    def _unroll(self, batch: HeadBatch, depth: int) -> tuple[list[Tensor], list[Tensor]]:
        """For each depth what the projection is applied to, [B, A, H], and which of it is chained."""
        with torch.autocast(self._device.type, torch.bfloat16):
            levels = list(self.head.unroll(batch, depth))
            return [self.head.output(x) for x, _ in levels], [chained for _, chained in levels]

    def _rate(self) -> float:
        done = self.step / self.num_steps
        if done < self.plan.warm_up:
            return self.plan.peak_rate * (done + 1 / self.num_steps) / self.plan.warm_up
        return self.plan.peak_rate * (0.02 + 0.98 * (1 + cos(pi * done)) / 2)

    def _save(self, path: Path) -> None:
        buffer = io.BytesIO()
        state = {
            "identity": self._identity,
            "step": self.step,
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, buffer)
        write_atomically(path, buffer.getvalue())

    def _restore(self, path: Path) -> None:
        if not path.exists():
            return
        state: dict[str, Any] = torch.load(path, map_location=self._device, weights_only=True)
        if state.get("identity") == self._identity:
            self.head.load_state_dict(state["head"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step = int(state["step"])


def _identity(plan: TrainingPlan, records: Sequence[Record], head: HeadModule) -> str:
    """The same for two trainings that go the same way."""
    seen = [plan, [(record.prompt_index, len(record.tokens)) for record in records], head.vocabulary.tolist()]
    start = head.fusion.detach().cpu().numpy().tobytes()
    return sha256(repr(seen).encode() + start).hexdigest()
