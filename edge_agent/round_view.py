"""A round as the demo page shows it: texts instead of ids, and what the target said of each place."""

from __future__ import annotations

import math
from typing import Any

from edge_agent.piece import Piece
from edge_agent.round import TokenEvent
from shared.detokenizer import IncrementalDetokenizer
from shared.tokenizer import Tokenizer


class RoundViewer:
    """Follows one answer: the text of a token may depend on those before it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer)

    def view(self, piece: Piece) -> dict[str, Any]:
        """What one round drafted, what became of it, and how long it took (milliseconds)."""
        round = piece.round
        draft = round.draft
        tokens = [self._token(event) for event in piece.tokens]
        if tokens and piece.finish_reason is not None:
            tokens[-1]["text"] += self._detokenizer.flush()
        return {
            "number": round.number,
            "mode": round.decision.mode.value,
            "gamma": round.decision.gamma,
            "reason": round.decision.reason.value,
            "drafter": draft.drafter if draft.tokens else None,
            "draft": [
                {
                    "text": self.spell(token),
                    "confidence": _share(draft.confidences[index] if index < len(draft.confidences) else None),
                    "accepted": index < round.accepted,
                }
                for index, token in enumerate(draft.tokens)
            ],
            "accepted": round.accepted,
            "next": self.spell(round.next_token),
            "tokens": tokens,
            "wait_ms": _ms(piece.wait_s),
            "draft_ms": _ms(round.draft_s),
            "verify_ms": _ms(round.verify_s),
            "finish_reason": piece.finish_reason.value if piece.finish_reason else None,
        }

    def spell(self, token: int) -> str:
        """A token by itself; half of a character shows as U+FFFD."""
        if token in self._tokenizer.special_ids:
            return self._tokenizer.decode([token], skip_special=False)
        return self._tokenizer.token_bytes(token).decode("utf-8", errors="replace")

    def _token(self, event: TokenEvent) -> dict[str, Any]:
        shown: dict[str, Any] = {"text": self._detokenizer.push(event.token), "origin": event.origin.value}
        if event.logprobs is not None:
            shown["probability"] = _share(math.exp(min(event.logprobs.logprob, 0.0)))
            shown["top"] = [[self.spell(token), _share(math.exp(min(lp, 0.0)))] for token, lp in event.logprobs.top[:4]]
        return shown


def _ms(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1e3, 2)


def _share(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
