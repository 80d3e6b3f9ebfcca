"""From rounds to text: stop strings, boundaries inside accepted runs, log probabilities, usage, the report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from edge_agent.answer import Answer
from edge_agent.decision import Decision, Mode, Reason
from edge_agent.energy import EnergyUse
from edge_agent.piece import Piece
from edge_agent.round import FinishReason, Origin, Round, TokenEvent
from shared.acceptance import Draft, TokenLogprobs
from tests.toy_engine import byte_tokenizer

SPECULATIVE = Decision(Mode.LOCAL_SPECULATIVE, 4, Reason.NOMINAL)
DIRECT = Decision(Mode.LOCAL_DIRECT, 0, Reason.DEVICE_WARM)
CLOUD = Decision(Mode.CLOUD_GENERATE, 0, Reason.DEVICE_HOT)


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ScriptedSession:
    """Hands out the rounds it was given; each takes `round_s` of the clock."""

    def __init__(self, rounds: Sequence[Round], clock: Clock, round_s: float = 1.0) -> None:
        self._rounds = rounds
        self._clock = clock
        self._round_s = round_s
        self.num_handed_out = 0
        self.closed = False

    async def run(self) -> AsyncIterator[Round]:
        try:
            for round in self._rounds:
                self._clock.now += self._round_s
                self.num_handed_out += 1
                yield round
        finally:
            self.closed = True


def make_round(
    number: int,
    text: bytes,
    *,
    accepted: int = 0,
    drafted: int = 0,
    finish: FinishReason | None = None,
    decision: Decision = SPECULATIVE,
    drafter: str = "ngram",
) -> Round:
    """A round that commits `text`, the first `accepted` bytes of it from the draft."""
    origin = Origin.TARGET if decision.mode.on_device else Origin.CLOUD
    events = tuple(
        TokenEvent(100 + i, byte, Origin.DRAFT if i < accepted else origin, TokenLogprobs(-0.5, ((byte, -0.5),)))
        for i, byte in enumerate(text)
    )
    draft = Draft(tuple(text[:accepted]) + (0,) * (drafted - accepted), drafter)
    return Round(number, decision, draft, accepted, text[-1] if text else 257, events, 0.1, 0.2, finish)


def run_answer(
    rounds: Sequence[Round], *, stop: Sequence[str] = (), take: int | None = None
) -> tuple[Answer, list[Piece], ScriptedSession]:
    clock = Clock()
    session = ScriptedSession(rounds, clock)
    answer = Answer(byte_tokenizer(), 10, stop=stop, clock=clock)

    async def scenario() -> list[Piece]:
        pieces = []
        stream = answer.pieces(session)
        async for piece in stream:
            pieces.append(piece)
            if take is not None and len(pieces) == take:
                await stream.aclose()
        return pieces

    return answer, asyncio.run(scenario()), session


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def logged(pieces: Sequence[Piece]) -> bytes:
    return bytes(entry.token for piece in pieces for entry in piece.logprobs)


def test_text_usage_and_report_of_a_plain_answer() -> None:
    answer, pieces, session = run_answer(
        [
            make_round(0, b"Hell", accepted=3, drafted=4),
            make_round(1, b"o,", accepted=1, drafted=2),
            make_round(2, b" you", accepted=3, drafted=3, finish=FinishReason.STOP),
        ]
    )
    assert text_of(pieces) == "Hello, you"
    assert [piece.finish_reason for piece in pieces] == [None, None, FinishReason.STOP]
    assert session.closed
    assert answer.tally.usage() == {
        "prompt_tokens": 10,
        "completion_tokens": 10,
        "total_tokens": 20,
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    }
    assert answer.tally.report() == {
        "tokens_by_origin": {"draft": 7, "target": 3, "cloud": 0},
        "rounds": 3,
        "draft_tokens": 9,
        "accepted_tokens": 7,
        "acceptance_rate": 0.7778,
        "decisions": [{"round": 0, "mode": "local_speculative", "gamma": 4, "reason": "nominal"}],
        "handoffs": [],
        "ttft_ms": 1000.0,
        "tokens_per_second": 3.0,
    }


@pytest.mark.parametrize("length", range(1, 12))
def test_stop_string_ends_answer_and_session_wherever_the_rounds_break(length: int) -> None:
    data = b"one two END three four"
    chunks = [data[i : i + length] for i in range(0, len(data), length)]
    rounds = [make_round(n, chunk, accepted=len(chunk) - 1, drafted=len(chunk)) for n, chunk in enumerate(chunks)]
    answer, pieces, session = run_answer(rounds, stop=["END"])
    assert text_of(pieces) == "one two "
    assert pieces[-1].finish_reason is FinishReason.STOP
    assert session.closed
    assert session.num_handed_out == -(-11 // length)
    assert answer.tally.usage()["completion_tokens"] == 11  # END itself was generated, what follows was not.
    assert sum(answer.tally.report()["tokens_by_origin"].values()) == 11
    assert logged(pieces) == b"one two "


def test_stop_string_at_the_very_end_of_the_limit_is_a_stop() -> None:
    _, pieces, _ = run_answer([make_round(0, b"ab.", finish=FinishReason.LENGTH)], stop=["."])
    assert (text_of(pieces), pieces[-1].finish_reason) == ("ab", FinishReason.STOP)


def test_text_held_back_for_a_stop_string_comes_out_when_it_is_none() -> None:
    _, pieces, _ = run_answer(
        [make_round(0, b"x EN"), make_round(1, b"OUGH EN", finish=FinishReason.LENGTH)], stop=["END"]
    )
    assert [piece.text for piece in pieces] == ["x ", "ENOUGH EN"]
    assert pieces[-1].finish_reason is FinishReason.LENGTH
    assert logged(pieces) == b"x ENOUGH EN"


def test_characters_are_never_sent_in_halves() -> None:
    face = "😀".encode()
    _, pieces, _ = run_answer(
        [make_round(n, bytes([byte])) for n, byte in enumerate(face)] + [make_round(4, b"!", finish=FinishReason.STOP)]
    )
    assert [piece.text for piece in pieces] == ["", "", "", "😀", "!"]
    assert [len(piece.logprobs) for piece in pieces] == [0, 0, 0, 4, 1]


def test_half_a_character_at_the_end_is_flushed() -> None:
    _, pieces, _ = run_answer([make_round(0, "é".encode()[:1], finish=FinishReason.LENGTH)])
    assert text_of(pieces) == "\ufffd"


def test_answer_without_tokens() -> None:
    answer, pieces, _ = run_answer([make_round(0, b"", finish=FinishReason.STOP, decision=DIRECT)])
    assert (text_of(pieces), pieces[-1].finish_reason) == ("", FinishReason.STOP)
    report = answer.tally.report()
    assert answer.tally.usage()["completion_tokens"] == 0
    assert "acceptance_rate" not in report
    assert "tokens_per_second" not in report


def test_decisions_list_the_first_and_each_change_and_handoffs_each_switch() -> None:
    answer, _, _ = run_answer(
        [
            make_round(0, b"a"),
            make_round(1, b"bc", accepted=1, drafted=1),
            make_round(2, b"d", decision=DIRECT),
            make_round(3, b"e", decision=CLOUD),
            make_round(4, b"f", decision=CLOUD),
            make_round(5, b"g", finish=FinishReason.STOP),
        ]
    )
    report = answer.tally.report()
    assert [(entry["round"], entry["mode"], entry["reason"]) for entry in report["decisions"]] == [
        (0, "local_speculative", "nominal"),
        (2, "local_direct", "device_warm"),
        (3, "cloud_generate", "device_hot"),
        (5, "local_speculative", "nominal"),
    ]
    assert report["handoffs"] == [
        {"position": 4, "to": "cloud", "reason": "device_hot"},
        {"position": 6, "to": "device", "reason": "nominal"},
    ]
    assert report["tokens_by_origin"] == {"draft": 1, "target": 4, "cloud": 2}


def test_predictions_are_counted_apart() -> None:
    answer, _, _ = run_answer(
        [
            make_round(0, b"abc", accepted=2, drafted=4, drafter="prediction"),
            make_round(1, b"de", accepted=1, drafted=3, drafter="ngram", finish=FinishReason.STOP),
        ]
    )
    assert answer.tally.usage()["completion_tokens_details"] == {
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 2,
    }
    assert answer.tally.report()["draft_tokens"] == 7


def test_leaving_early_closes_the_session() -> None:
    _, pieces, session = run_answer([make_round(n, b"x") for n in range(10)], take=2)
    assert len(pieces) == 2
    assert session.closed
    assert session.num_handed_out == 2


def test_energy_is_reported_with_its_source() -> None:
    answer, _, _ = run_answer([make_round(0, b"a", finish=FinishReason.STOP)])
    assert "energy_j" not in answer.tally.report()
    answer.tally.energy = EnergyUse(draft=0.25, verify=1.0, prefill=2.0)
    answer.tally.energy_source = "cpu_time_model"
    report = answer.tally.report()
    assert (report["energy_j"], report["energy_source"]) == (3.25, "cpu_time_model")
