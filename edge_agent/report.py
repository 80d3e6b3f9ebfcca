"""How an answer was made: the counts behind OpenAI's `usage` and our `souschef` object."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from edge_agent.decision import Decision
from edge_agent.energy import EnergyUse
from edge_agent.piece import Piece
from edge_agent.round import Origin, Round

PREDICTION_DRAFTER = "prediction"
"""Name of the drafter whose tokens OpenAI's usage counts apart."""


class CompletionTokensDetails(TypedDict):
    """What became of the caller's `prediction`."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """OpenAI's `usage`. A stop id is not counted, a stop string's tokens are."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails


class DecisionEntry(TypedDict):
    """The orders from a round on, until the next entry."""

    round: int
    mode: str
    gamma: int
    reason: str


class HandoffEntry(TypedDict):
    """A switch of who produces the next tokens. position: how many tokens the answer had by then."""

    position: int
    to: Literal["device", "cloud"]
    reason: str


class Report(TypedDict):
    """The `souschef` object of a response. What was not measured is absent.

    accepted_tokens: draft tokens that became part of the answer. tokens_per_second: decoding alone, by the time rounds
    took to come; the first round's tokens are excluded.
    """

    tokens_by_origin: dict[str, int]
    rounds: int
    draft_tokens: int
    accepted_tokens: int
    acceptance_rate: NotRequired[float]
    decisions: list[DecisionEntry]
    handoffs: list[HandoffEntry]
    ttft_ms: NotRequired[float]
    tokens_per_second: NotRequired[float]
    energy_j: NotRequired[float]
    energy_source: NotRequired[str]


class Tally:
    """The counts behind usage and the report."""

    def __init__(self, prompt_length: int, arrived: float) -> None:
        self._prompt_length = prompt_length
        self._arrived = arrived
        self._tokens_by_origin: Counter[Origin] = Counter()
        self._drafted: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._decisions: list[tuple[int, Decision]] = []
        self._handoffs: list[HandoffEntry] = []
        self._num_rounds = 0
        self._num_first_tokens = 0
        self._decode_s = 0.0
        self.ttft_s: float | None = None
        self.energy = EnergyUse()
        self.energy_source: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return self._tokens_by_origin.total()

    @property
    def last_decision(self) -> Decision | None:
        """How the latest round was decoded; None before the first."""
        return self._decisions[-1][1] if self._decisions else None

    def add(self, piece: Piece, now: float) -> None:
        """Count one more round, which came at `now`."""
        round = piece.round
        self._note_decision(round)
        if self.ttft_s is None:
            self.ttft_s = max(now - self._arrived, 0.0)
            self._num_first_tokens = len(piece.tokens)
        else:
            self._decode_s += piece.wait_s
        self._num_rounds += 1
        self._tokens_by_origin.update(event.origin for event in piece.tokens)
        self._drafted[round.draft.drafter] += len(round.draft)
        self._accepted[round.draft.drafter] += piece.num_accepted

    def _note_decision(self, round: Round) -> None:
        previous = self.last_decision
        if previous is not None and previous.mode.on_device != round.decision.mode.on_device:
            self._handoffs.append(
                {
                    "position": self.num_tokens,
                    "to": "device" if round.decision.mode.on_device else "cloud",
                    "reason": round.decision.reason.value,
                }
            )
        if round.decision != previous:
            self._decisions.append((round.number, round.decision))

    def usage(self) -> Usage:
        """OpenAI's `usage`."""
        predicted, accepted = self._drafted[PREDICTION_DRAFTER], self._accepted[PREDICTION_DRAFTER]
        return {
            "prompt_tokens": self._prompt_length,
            "completion_tokens": self.num_tokens,
            "total_tokens": self._prompt_length + self.num_tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": predicted - accepted,
            },
        }

    def report(self) -> Report:
        """The `souschef` object. What was not measured is absent."""
        drafted, accepted = self._drafted.total(), self._accepted.total()
        report: Report = {
            "tokens_by_origin": {origin.value: self._tokens_by_origin[origin] for origin in Origin},
            "rounds": self._num_rounds,
            "draft_tokens": drafted,
            "accepted_tokens": accepted,
            "decisions": [
                {"round": number, "mode": decision.mode.value, "gamma": decision.gamma, "reason": decision.reason.value}
                for number, decision in self._decisions
            ],
            "handoffs": list(self._handoffs),
        }
        if drafted:
            report["acceptance_rate"] = round(accepted / drafted, 4)
        if self.ttft_s is not None:
            report["ttft_ms"] = round(self.ttft_s * 1000, 1)
        if self._decode_s > 0:
            report["tokens_per_second"] = round((self.num_tokens - self._num_first_tokens) / self._decode_s, 2)
        if self.energy_source is not None:
            report["energy_j"] = round(self.energy.total, 3)
            report["energy_source"] = self.energy_source
        return report
