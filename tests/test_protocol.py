"""The wire's types: small, closed, and the only thing that edge and cloud share."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pydantic import ValidationError

from shared.acceptance import TokenLogprobs
from shared.protocol import (
    MAX_GAMMA,
    Load,
    Opening,
    VerifyReply,
    VerifyRequest,
    WireLogprobs,
    tokens_crc,
)
from shared.sampling import SamplingParams

ROOT = Path(__file__).parents[1]


def test_a_round_is_small_and_comes_back() -> None:
    request = VerifyRequest(
        session_id="abcdefgh", round=7, prefix_len=300, prefix_crc=1, draft_tokens=(11111, 22222, 33333)
    )
    assert VerifyRequest.model_validate_json(request.encode()) == request
    assert len(request.encode()) < 130
    reply = VerifyReply(round=7, accepted=3, next_token=44444, timing_ms=120.5, load=Load(gamma_hint=8))
    assert VerifyReply.model_validate_json(reply.encode()) == reply
    assert b'"protocol":1' in reply.encode()


def test_an_opening_carries_the_sampling_and_its_seed() -> None:
    sampling = SamplingParams(seed=2**63 + 1, temperature=0.7, logit_bias={5: -1.5})
    opening = Opening(tokens=(1, 2, 3), prompt_len=2, sampling=sampling, stop_ids=(9,), logprobs=2)
    request = VerifyRequest(session_id="abcdefgh", round=0, opening=opening)
    assert VerifyRequest.model_validate_json(request.encode()).opening == opening


def test_log_probabilities_survive_exactly() -> None:
    value = TokenLogprobs(-0.1234567890123456789, ((3, -0.5), (4, -1e-17)))
    wire = WireLogprobs.model_validate_json(WireLogprobs.of(value).model_dump_json())
    assert wire.value() == value


@pytest.mark.parametrize(
    "change",
    [
        {"session_id": "../../etc"},
        {"session_id": "short"},
        {"round": -1},
        {"draft_tokens": list(range(MAX_GAMMA + 1))},
        {"draft_tokens": [-1]},
        {"draft_tokens": [2**31]},
        {"base_url": "http://elsewhere"},
        {"prefix_crc": 2**32},
        {"opening": {"tokens": [], "prompt_len": 1}},
        {"opening": {"tokens": [1], "prompt_len": 1, "sampling": {"temperature": float("nan")}}},
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        VerifyRequest.model_validate({"session_id": "abcdefgh", "round": 0, **change})


def test_the_checksum_tells_order_length_and_ids_apart() -> None:
    sums = [tokens_crc(tokens) for tokens in ([], [0], [0, 0], [1, 2], [2, 1], [258], [2, 1, 0])]
    assert len(set(sums)) == len(sums)
    assert tokens_crc([1, 2]) == tokens_crc((1, 2))


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("edge_agent", "cloud_service"),
        ("cloud_service", "edge_agent"),
        ("shared", "edge_agent"),
        ("shared", "cloud_service"),
    ],
)
def test_the_services_never_import_each_other(package: str, forbidden: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.split(".")[0] == forbidden], path
