"""Section A: speculative decoding. Each case twice: judged on the device, and through the cloud's protocol."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.losslessness import compare, row_noise
from edge_agent.answer_grammar import answer_grammar
from edge_agent.controller import FixedPolicy, RoundState
from edge_agent.cost_model import CostModel
from edge_agent.decision import Reason
from edge_agent.device_state import DeviceState
from edge_agent.drafters import ModelDrafter, NgramDrafter
from edge_agent.engine import Engine, LocalModel
from edge_agent.link_state import LinkState
from edge_agent.openai_schema import ChatRequest
from edge_agent.policy_controller import PolicyEngine, Senses
from edge_agent.request import Execution, GenerationRequest
from edge_agent.round import FinishReason, Round
from edge_agent.thresholds import PRESETS, Preset
from shared import acceptance
from shared.acceptance import Draft, judge, residual
from shared.chat_template import ChatTemplate
from shared.errors import TokenizerMismatchError
from shared.grammar import GrammarCompiler
from shared.inference_thread import InferenceThread
from shared.kv_slots import SlotPool
from shared.models.build import build_model
from shared.onnx_batch import OnnxBatchModel
from shared.onnx_lm import OnnxModel
from shared.sampling import AcceptanceRule, Distribution, Sampler, SamplingParams, filtered_softmax
from shared.tokenizer import Tokenizer
from tests.cases.places import (
    CLOUD,
    DEVICE,
    FixedLM,
    NewDrafter,
    Place,
    both_places,
    direct,
    no_drafts,
    open_place,
    scripted,
    tokens,
    total_variation,
    toy,
)
from tests.cloud_edge import cloud_client
from tests.cloud_toy import VOCAB, running_cloud
from tests.fakes import TableLM
from tests.random_decoder import DecoderShape, write_random_decoder
from tests.servers import chat, run_server
from tests.toy_engine import byte_tokenizer, table_engine, toy_settings

PROMPT = (1, 2, 3, 1, 2)
SAMPLES = {DEVICE: 20_000, CLOUD: 5_000}
TOLERANCES = {DEVICE: 0.02, CLOUD: 0.025}
"""Total variation. Fewer samples where each costs an exchange: the bugs looked for are 0.05 and more off."""
P = [0.4, 0.3, 0.2, 0.1]
Q = [0.5, 0.3, 0.1, 0.1]
FILTERS = [{"top_k": 2}, {"top_p": 0.75}, {"min_p": 0.6}, {"temperature": 0.7}]


@pytest.fixture(params=[DEVICE, CLOUD])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """The toy target, in each place."""
    with open_place(request.param) as opened:
        yield opened


def drafted_by(lm: Callable[[], TableLM]) -> NewDrafter:
    return lambda thread: ModelDrafter(lm(), thread)


ITSELF = drafted_by(toy)
RELATIVE = drafted_by(lambda: TableLM(VOCAB, 99, tied_to=toy(), blend=0.3, context_length=32_768))
WRONG = scripted(lambda tokens, gamma: [0] * gamma)


def sample(where: str, p: Sequence[float], new_drafter: NewDrafter, **params: Any) -> list[int]:
    """Tokens of long answers from a target that says the same everywhere, so that each is one more sample."""
    length = 400
    requests = [
        GenerationRequest(PROMPT, length, SamplingParams(seed=seed, **params))
        for seed in range(SAMPLES[where] // length)
    ]
    with open_place(where, lambda: FixedLM(p)) as place:
        return [token for rounds in place.answers(requests, new_drafter, 8) for token in tokens(rounds)]


@pytest.mark.parametrize(
    ("where", "rule", "filters"),
    # Under the coupled rule the cloud's text is the device's, token by token: A16 holds that.
    [(DEVICE, rule, filters) for rule in AcceptanceRule for filters in FILTERS]
    + [(CLOUD, AcceptanceRule.REJECTION, FILTERS[0])]
    + [pytest.param(CLOUD, AcceptanceRule.REJECTION, each, marks=pytest.mark.slow) for each in FILTERS[1:]],
)
def test_A1_draft_and_target_go_through_the_same_filters(
    where: str, rule: AcceptanceRule, filters: dict[str, float]
) -> None:
    """The ratio p/q uses the raw q while the draft was drawn from the filtered one: biased (transformers#47932).

    Here: one `Sampler` filters both sides, and the draft carries what it was really drawn from; to the cloud go ids
    alone, judged by rules that are exact for any draft.
    """
    expected = filtered_softmax(np.log(np.array(P)), SamplingParams(**filters))
    probs = np.zeros(4)
    probs[expected.ids] = expected.probs
    drawn = sample(where, P, drafted_by(lambda: FixedLM(Q)), rule=rule, **filters)
    assert total_variation(drawn, probs.tolist()) < TOLERANCES[where]
    if "top_k" in filters:
        assert probs.tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])


@both_places
@pytest.mark.parametrize("rule", AcceptanceRule)
def test_A2_a_greedy_draft_is_one_hot(where: str, rule: AcceptanceRule) -> None:
    """The draft is an argmax and its softmax is taken for q: 0.75 where 0.60 is right (transformers#32867).

    Here: a draft that wasn't drawn is one-hot by construction.
    """
    drawn = sample(where, [0.6, 0.4], scripted(lambda tokens, gamma: [0] * gamma), rule=rule)
    assert total_variation(drawn, [0.6, 0.4]) < TOLERANCES[where]


def test_A3_residual_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Softmax instead of normalising, 0/0 where p equals q, a coin of 0 that accepts p = 0 (sglang#35771).

    Here: the excess is normalised, there is a way out where it is empty, and the comparison is strict.
    """
    ids = np.arange(3)
    p, q = Distribution(ids, np.array([0.5, 0.3, 0.2])), Distribution(ids, np.array([0.7, 0.2, 0.1]))
    assert residual(p, q).ids.tolist() == [1, 2]
    assert residual(p, q).probs == pytest.approx([0.5, 0.5])
    assert residual(p, p).probs.tolist() == p.probs.tolist()
    monkeypatch.setattr(acceptance, "uniform", lambda seed, position, ids, noise=None: np.zeros(len(ids)))
    sampler = Sampler(SamplingParams(rule=AcceptanceRule.REJECTION, top_k=2))
    rows = np.tile(np.log([0.5, 0.3, 0.2]), (2, 1))
    assert judge(rows, Draft((2,), "toy", (q,)), sampler, 0).accepted == 0


@both_places
@pytest.mark.parametrize("rule", AcceptanceRule)
def test_A3_output_follows_the_target_and_what_it_rules_out_never_comes(where: str, rule: AcceptanceRule) -> None:
    drawn = sample(where, [0.5, 0.3, 0.2], drafted_by(lambda: FixedLM([0.7, 0.2, 0.1])), rule=rule)
    assert total_variation(drawn, [0.5, 0.3, 0.2]) < TOLERANCES[where]
    ruled_out = scripted(lambda tokens, gamma: [9] * gamma)
    with open_place(where, lambda: FixedLM([0.5, 0.3, 0.2])) as place:
        request = GenerationRequest(PROMPT, 200, SamplingParams(seed=1, rule=rule))
        rounds = place.rounds(request, ruled_out)
    assert [round.accepted for round in rounds] == [0] * 200
    assert 9 not in tokens(rounds)


@pytest.mark.parametrize("boundary", range(6))
@pytest.mark.parametrize("gamma", [1, 4, 5])
def test_A5_the_earliest_boundary_wins(place: Place, boundary: int, gamma: int) -> None:
    """Tokens after a stop, or past max_tokens, come out of an accepted run (sglang#31599, vLLM#47616).

    Here: the verdict's tokens are taken one by one up to the first boundary; a stop id is never part of the answer.
    """
    sampling = SamplingParams(seed=2)
    free, _ = direct(GenerationRequest(PROMPT, 60, sampling))
    first_at = next(i for i in range(boundary, 60) if free[i] not in free[:i])
    stop = frozenset({free[first_at]})
    stopped = place.rounds(GenerationRequest(PROMPT, 60, sampling, stop, num_top_logprobs=0), ITSELF, gamma)
    assert (tokens(stopped), stopped[-1].finish_reason) == (free[:first_at], FinishReason.STOP)
    assert all(event.logprobs is not None for round in stopped for event in round.tokens)
    limited = place.rounds(GenerationRequest(PROMPT, boundary + 1, sampling, stop), ITSELF, gamma)
    reason = FinishReason.STOP if first_at <= boundary else FinishReason.LENGTH
    assert tokens(limited) == free[: min(first_at, boundary + 1)]
    assert limited[-1].finish_reason is reason


@pytest.mark.parametrize("limit", range(1, 7))
def test_A5_usage_is_what_was_emitted(limit: int) -> None:
    with run_server(toy_settings(), lambda: table_engine(gamma=4)) as server:
        body = chat(server, max_tokens=limit, logprobs=True).json()
    assert body["usage"]["completion_tokens"] == limit == len(body["choices"][0]["logprobs"]["content"])
    assert sum(body["souschef"]["tokens_by_origin"].values()) == limit


@pytest.mark.parametrize("rule", AcceptanceRule)
def test_A6_the_drafts_cache_takes_in_its_last_token(place: Place, rule: AcceptanceRule) -> None:
    """After full acceptance the draft's cache lacks its last token: slower and slower, never wrong (vLLM#9730).

    Here: before it drafts, a drafter's cache is brought to the committed tokens, whatever came of the last round.
    """
    caches: list[TableLM] = []

    def new_drafter(thread: InferenceThread) -> ModelDrafter:
        caches.append(toy())
        return ModelDrafter(caches[-1], thread)

    request = GenerationRequest(PROMPT, 200, SamplingParams(seed=3, rule=rule))
    rounds = place.rounds(request, new_drafter, 4)
    if rule is AcceptanceRule.COUPLED or place.where == DEVICE:
        assert all(round.accepted == len(round.draft) for round in rounds)
        assert len(rounds) == 40
    answer = [*PROMPT, *tokens(rounds)]
    held = caches[0].tokens
    assert held == answer[: len(held)]
    assert len(answer) - len(held) <= 2, "the bonus, and the last draft token, which is fed with it"


def test_A7_gamma_falls_to_nothing_and_comes_back(place: Place) -> None:
    """After rounds without drafts acceptance stays low: the draft never saw those tokens (TensorRT-LLM#16888).

    Here: the drafter catches up with all committed tokens before it drafts again; gamma belongs to the request.
    """

    def gamma(state: RoundState) -> int:
        return 0 if 5 <= state.round < 25 else 4

    request = GenerationRequest(PROMPT, 100, SamplingParams(seed=11))
    for _ in range(2):
        rounds = place.rounds(request, ITSELF, gamma)
        assert tokens(rounds) == direct(request)[0]
        assert [len(round.draft) for round in rounds[5:25]] == [0] * 20
        assert all(round.accepted == len(round.draft) for round in rounds)
        assert len(rounds[0].draft) == 4


def swapped_tokenizer() -> Tokenizer:
    """The byte tokenizer with two entries of its vocabulary swapped: same size, other meaning."""
    plain = byte_tokenizer()
    definition = json.loads(plain._tokenizer.to_str())
    vocabulary = definition["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    return Tokenizer(definition, eos_ids=[257])


def test_A9_two_tokenizers_of_one_size_on_the_device() -> None:
    """Vocabularies of one size but other ids: silently corrupt output (sglang#24051).

    Here: draft and target, edge and cloud compare a hash over the whole vocabulary, and refuse.
    """
    models = [
        LocalModel(name, tokenizer, SlotPool(lambda: TableLM(258), 1), 256, 0)
        for name, tokenizer in (("target", byte_tokenizer()), ("draft", swapped_tokenizer()))
    ]
    assert models[0].tokenizer.vocab_size == models[1].tokenizer.vocab_size
    thread = InferenceThread()
    try:
        with pytest.raises(TokenizerMismatchError, match="draft can't draft for target"):
            Engine(*models, thread, FixedPolicy(4), ChatTemplate(None, None, None))
    finally:
        thread.stop()


def test_A9_two_tokenizers_of_one_size_through_the_cloud() -> None:
    async def greet(url: str) -> None:
        async with cloud_client(url) as client:
            client._hello = client._hello.model_copy(update={"tokenizer_fingerprint": swapped_tokenizer().fingerprint})
            with pytest.raises(TokenizerMismatchError, match="stay on this device"):
                await client.handshake()

    with running_cloud() as cloud:
        message = {"protocol": 1, "tokenizer_fingerprint": swapped_tokenizer().fingerprint, "vocab_size": VOCAB}
        assert httpx.post(f"{cloud.url}/v1/handshake", json=message).status_code == 409
        asyncio.run(greet(cloud.url))


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 1.5, "temperature": 0},
        {"presence_penalty": 1.0, "repetition_penalty": 1.3},
        {"logit_bias": {3: 2.5, 7: -100.0}},
        {"min_tokens": 8},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("drafter", [ITSELF, RELATIVE, WRONG], ids=["itself", "relative", "wrong"])
def test_A10_penalties_bias_and_min_tokens_under_speculation(
    place: Place, drafter: NewDrafter, fields: dict[str, Any]
) -> None:
    """Penalties count once a round, rejected drafts leak into the counts, an end comes too early (vLLM#6718).

    Here: each position is judged with the drafts accepted before it, on a copy that is thrown away.
    """
    sampling = SamplingParams(seed=5, **fields)
    stop = frozenset({direct(GenerationRequest(PROMPT, 3, sampling))[0][2]}) if "min_tokens" in fields else frozenset()
    request = GenerationRequest(PROMPT, 60, sampling, stop)
    rounds = place.rounds(request, drafter, 4)
    expected, reason = direct(request)
    assert (tokens(rounds), rounds[-1].finish_reason) == (expected, reason)
    if "min_tokens" in fields:
        assert len(expected) >= 8
    if drafter is ITSELF:
        assert all(round.accepted == len(round.draft) for round in rounds[:-1])


def test_A12_seeds_under_load_on_the_device() -> None:
    """A seed's text changes beside other requests; requests without one share a stream (vLLM#6038, #9441).

    Here: noise is a pure function of seed, position and token id; without a seed each request draws one of its own.
    """
    with run_server(toy_settings(max_running=9), lambda: table_engine(sharpness=1.0, max_slots=9)) as server:

        def text(**fields: Any) -> str:
            return str(
                chat(server, temperature=1, max_tokens=40, logprobs=True, **fields).json()["choices"][0]["logprobs"]
            )

        alone = text(seed=7)
        with ThreadPoolExecutor(9) as pool:
            beside = pool.submit(text, seed=7)
            others = [pool.submit(text) for _ in range(8)]
            assert beside.result() == alone
            assert len({other.result() for other in others}) == 8


def test_A12_seeds_under_load_through_the_cloud() -> None:
    request = GenerationRequest(PROMPT, 40, SamplingParams(seed=7))

    async def beside(place: Place) -> list[list[Round]]:
        others = [GenerationRequest(PROMPT, 40, SamplingParams(seed=100 + n)) for n in range(8)]
        return await asyncio.gather(*(place.answer(each, RELATIVE) for each in (request, *others)))

    with open_place(CLOUD) as place:
        together = asyncio.run(beside(place))
    assert tokens(together[0]) == direct(request)[0]
    assert len({tuple(tokens(rounds)) for rounds in together}) == 9


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["kettle", "kettledrum"]}, "on": {"type": "boolean"}, "n": {"enum": [1, 22, 333]}},
    "required": ["kind", "on", "n"],
    "additionalProperties": False,
}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}


class FenceDrafter(NgramDrafter):
    """Opens a code fence in every other round, as models like to; looks up the rest."""

    def __init__(self) -> None:
        super().__init__()
        self._rounds = itertools.count()

    async def propose(self, tokens: Sequence[int], gamma: int, sampler: Sampler) -> Draft:
        found = await super().propose(tokens, gamma, sampler)
        return found if found.tokens and next(self._rounds) % 2 else Draft(tuple(b"```")[:gamma], "fence")


@pytest.mark.parametrize("rule", AcceptanceRule)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_A13_grammar_on_the_device(rule: AcceptanceRule, temperature: float) -> None:
    """A draft that breaks the grammar aborts, or its tokens stay in the grammar's state (vLLM#18783, sglang#28943).

    Here: every position is masked by the grammar's state there, drafting and judging work on forks of it, and the
    answer is the one that direct decoding gives. It parses unless max_tokens cuts it, which finish_reason says.
    """
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "response_format": JSON_FORMAT})
    grammar = answer_grammar(body)
    assert grammar is not None
    constraint = GrammarCompiler(byte_tokenizer()).compile(*grammar)
    example = b'{"kind": "kettledrum", "on": true, "n": 333}'
    accepted: dict[str, int] = {}
    first: list[str] = []
    for name, new_drafter in {
        "none": no_drafts,
        "fence": lambda thread: FenceDrafter(),
        "itself": lambda thread: ModelDrafter(TableLM(258, 5), thread),
    }.items():
        texts = []
        accepted[name] = drafted = 0
        for seed in range(6):
            sampling = SamplingParams(seed=seed, temperature=temperature, rule=rule)
            request = GenerationRequest(tuple(example), 400, sampling, frozenset({257}), constraint=constraint)
            with open_place(DEVICE, lambda: TableLM(258, 5, sharpness=1.0)) as place:
                rounds = place.rounds(request, new_drafter, 4)
            drafted += sum(len(round.draft) for round in rounds)
            accepted[name] += sum(round.accepted for round in rounds)
            texts.append(bytes(tokens(rounds)).decode())
            assert rounds[-1].finish_reason is FinishReason.STOP
            assert json.loads(texts[-1])["n"] in (1, 22, 333)
        if rule is AcceptanceRule.COUPLED or temperature == 0:
            first = first or texts
            assert texts == first, name
        assert accepted[name] < drafted or name != "fence"
    assert accepted["fence"] > 0
    assert accepted["itself"] > 0


def test_A13_a_grammar_never_goes_to_the_cloud() -> None:
    """The protocol carries no grammars: whatever the device's state, such a request stays, and says why."""
    link = LinkState(configured=True, healthy=True, rtt_s=0.01, verify_cost_s=(0.01,) * 9, max_gamma=8, gamma_hint=8)
    senses = Senses(device=lambda: DeviceState(temperature_c=99.0), link=lambda: link)
    engine = PolicyEngine(CostModel([0.03] * 9), PRESETS[Preset.PHONE], senses=senses)
    grammar = answer_grammar(
        ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "response_format": JSON_FORMAT})
    )
    assert grammar is not None
    held = GrammarCompiler(byte_tokenizer()).compile(*grammar)
    for execution in (Execution.AUTO, Execution.PREFER_CLOUD):
        free = GenerationRequest(PROMPT, 50, execution=execution)
        structured = GenerationRequest(PROMPT, 50, execution=execution, constraint=held)
        assert not engine.open(free).decide(RoundState(free, 0, 0, 100)).mode.on_device
        decision = engine.open(structured).decide(RoundState(structured, 0, 0, 100))
        assert decision.mode.on_device
        assert decision.reason is Reason.STRUCTURED


@pytest.mark.parametrize("kind", ["alone", "row"])
def test_A15_the_edges_of_truncate(kind: str, tmp_path: Path) -> None:
    """Cutting to nothing keeps everything; a negative length is taken (transformers#47433, mlx-lm#1528).

    Here: 0 empties, what makes no sense raises before anything changes, and an error at any await leaves a cache that
    gives the next request the same answer.
    """
    model = random_decoder(tmp_path)
    if kind == "row":
        model = OnnxBatchModel(model.directory, context_length=64, max_batch=2)
    lm = model.new_cache()
    lm.forward([1, 2, 3, 4], 0)
    for length in (-1, 5, 99):
        with pytest.raises(ValueError, match=r"0\.\.4"):
            lm.truncate(length)
        assert list(lm.tokens) == [1, 2, 3, 4]
    again = lm.forward([5], 1).copy()
    lm.truncate(0)
    assert list(lm.tokens) == []
    assert np.array_equal(lm.forward([1, 2, 3, 4, 5], 1).argmax(), again.argmax())


@both_places
def test_A15_a_failure_at_any_await_leaves_no_trace(where: str) -> None:
    request = GenerationRequest(PROMPT, 30, SamplingParams(seed=4))
    expected = direct(request)[0]

    async def cancelled_after(place: Place, num_steps: int) -> None:
        task = asyncio.ensure_future(place.answer(request, RELATIVE))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    shared = toy()
    with open_place(where, (lambda: shared) if where == DEVICE else toy) as place:
        for num_steps in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89):
            asyncio.run(cancelled_after(place, num_steps))
            assert tokens(place.rounds(request, RELATIVE)) == expected


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", [ITSELF, RELATIVE, WRONG], ids=["itself", "relative", "wrong"])
def test_A16_lossless_on_exact_arithmetic(place: Place, drafter: NewDrafter, temperature: float) -> None:
    """Byte equality is asked of INT4 kernels that differ between one row and many (mlx-lm#1109, vLLM#7627).

    Here: equal on float64; on INT4 a difference only where the target's own gap is within twice the measured noise.
    """
    for gamma in (1, 4, 8):
        request = GenerationRequest(PROMPT, 120, SamplingParams(seed=gamma, temperature=temperature))
        assert tokens(place.rounds(request, drafter, gamma)) == direct(request)[0]


def random_decoder(tmp_path: Path) -> OnnxModel:
    """A small INT4 decoder on ONNX Runtime."""
    gguf_path = tmp_path / "random.gguf"
    write_random_decoder(gguf_path, DecoderShape("qwen2"))
    build_model(gguf_path, tmp_path / "model", role="q4", progress=lambda what, done: None)
    return OnnxModel(tmp_path / "model", context_length=256)


def test_A16_the_gap_rule_on_int4_kernels(tmp_path: Path) -> None:
    lm = random_decoder(tmp_path).new_cache()
    prompt = list(range(10, 40))
    direct_tokens, equal, gap = compare(lm, prompt, 100, 4, frozenset())
    noise = row_noise(lm, [*prompt, *direct_tokens], 5, len(prompt))
    assert equal == len(direct_tokens) or (gap is not None and gap <= 2 * noise)
    assert len(direct_tokens) == 100
