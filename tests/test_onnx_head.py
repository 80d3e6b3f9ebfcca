"""A draft head on ONNX Runtime beside the target whose hidden states it reads, up to a whole engine."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import pytest

from benchmarks.losslessness import compare, row_noise
from edge_agent.config import load_settings
from edge_agent.device import Device
from edge_agent.drafters import HeadDrafter
from edge_agent.engine import Engine
from edge_agent.head_choice import choose_head, packaged_head
from edge_agent.loading import load_engine
from edge_agent.model_commands import print_model
from edge_agent.policy_controller import PolicyEngine, Senses
from edge_agent.request import GenerationRequest, Speculation
from edge_agent.scenarios import built_in
from shared.chat_template import ChatTemplate
from shared.errors import ContextLengthError, ModelFileError, UnsupportedModelError
from shared.inference_thread import InferenceThread
from shared.models.build import build_model
from shared.models.head import HeadSpec, HeadWeights, open_head, write_head
from shared.models.quantise import Precision
from shared.models.scheme import Scheme, TensorClass
from shared.models.target_embedding import TargetEmbedding
from shared.onnx_head import OnnxHead, OnnxHeadCache
from shared.onnx_lm import OnnxModel
from shared.sampling import SamplingParams
from shared.tokenizer import Tokenizer
from tests.random_decoder import DecoderShape, write_random_decoder
from tests.random_head import as_stored, random_head, reference_head

CONTEXT = 128
# Activations stay floats, so that one row and several differ by rounding alone.
FLOATS = Scheme("floats", 0, dict.fromkeys(TensorClass, Precision(8, 32, True)))
TOKENS = np.random.default_rng(2).integers(3, 250, 40).tolist()


@dataclass(frozen=True)
class Pair:
    """A random target and a random head for it."""

    target: Path
    head: Path
    spec: HeadSpec
    weights: HeadWeights

    def head_cache(self) -> OnnxHeadCache:
        head = open_head(self.head, target=self.target)
        return OnnxHead(head, TargetEmbedding(self.target), context_length=CONTEXT).new_cache()


def write_pair(path: Path, *, seed: int = 0) -> Pair:
    write_random_decoder(path / "random.gguf", DecoderShape("qwen2"), kinds={"token_embd": "Q8_0"}, seed=seed)
    build_model(path / "random.gguf", path / "target", role=FLOATS, progress=lambda _what, _done: None)
    spec = HeadSpec.of_target(path / "target")
    weights = random_head(spec)
    write_head(path / "head", weights, spec, accuracy_level=0)
    return Pair(path / "target", path / "head", spec, weights)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("pair"))


def states_after(model: OnnxModel, chunks: Sequence[Sequence[int]]) -> np.ndarray:
    lm = model.new_cache_with_hidden_states()
    for chunk in chunks:
        lm.forward(chunk, 1)
    return lm.hidden_states(0, len(lm.tokens)).copy()


def test_hidden_states_stay_for_as_long_as_their_tokens(pair: Pair) -> None:
    model = OnnxModel(pair.target, context_length=CONTEXT)
    whole = states_after(model, [TOKENS])
    assert whole.shape == (len(TOKENS), model.hidden_size)
    assert np.allclose(states_after(model, [TOKENS[:7], TOKENS[7:8], TOKENS[8:]]), whole, atol=0.1 * whole.std())
    lm = model.new_cache_with_hidden_states()
    lm.forward(TOKENS[:20], 0)
    before = lm.hidden_states(0, 12).copy()
    lm.truncate(12)
    lm.forward([7, 7, 7], 3)
    assert np.array_equal(lm.hidden_states(0, 12), before)
    for start, stop in ((0, 16), (-1, 3), (5, 4)):
        with pytest.raises(ValueError, match="not within"):
            lm.hidden_states(start, stop)


def test_keeping_them_changes_no_logit(pair: Pair) -> None:
    model = OnnxModel(pair.target, context_length=CONTEXT)
    assert np.array_equal(model.new_cache().forward(TOKENS, 3), model.new_cache_with_hidden_states().forward(TOKENS, 3))


def test_a_graph_without_hidden_states_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model = OnnxModel(pair.target, context_length=CONTEXT)
    monkeypatch.setattr(OnnxModel, "hidden_size", None)
    with pytest.raises(UnsupportedModelError, match="hidden_states"):
        model.new_cache_with_hidden_states()


def test_a_head_says_what_its_reference_says_however_it_is_fed(pair: Pair) -> None:
    """The prompt in one call, then two tokens, a rewind, and drafting on with its own features."""
    features = np.random.default_rng(4).standard_normal((30, pair.spec.hidden_size)).astype(np.float32)
    embeddings = TargetEmbedding(pair.target).rows(TOKENS)
    stored = as_stored(pair.weights)

    def expected(count: int, own: int = 0) -> np.ndarray:
        """Logits after `count` tokens and `own` more that were taken in with the head's features."""
        fed = features[: count - 1]
        for more in range(own + 1):
            logits, x = reference_head(stored, pair.spec, embeddings[1 : count + more], fed)
            fed = np.concatenate([fed, x[-1:]])
        return logits[-1]

    def close(found: np.ndarray, wanted: np.ndarray) -> bool:
        known = found[pair.weights.vocabulary]
        return bool(np.abs(known - wanted).max() < 1e-3 * wanted.std())

    head = pair.head_cache()
    assert close(head.forward(TOKENS[:9], features[:8]).logits, expected(9))
    assert close(head.forward(TOKENS[9:11], features[8:10]).logits, expected(11))
    head.truncate(5)
    output = head.forward(TOKENS[5:9], features[4:8])
    assert close(output.logits, expected(9))
    output = head.forward(TOKENS[9:10], output.features)
    assert close(output.logits, expected(9, own=1))
    output = head.forward(TOKENS[10:11], output.features)
    assert close(output.logits, expected(9, own=2))
    assert list(head.tokens) == TOKENS[:11]


def test_ids_that_the_head_does_not_know_lie_far_under_all_others(pair: Pair) -> None:
    head = pair.head_cache()
    logits = head.forward(TOKENS[:5], np.ones((4, pair.spec.hidden_size), np.float32)).logits
    assert logits.shape == (pair.spec.vocab_size,)
    known = np.isin(np.arange(pair.spec.vocab_size), pair.weights.vocabulary)
    assert logits[known].min() > logits[~known].max() + 1000
    assert np.isfinite(logits).all()


def test_what_does_not_fit_is_refused_and_nothing_is_taken_in(pair: Pair) -> None:
    head = pair.head_cache()
    features = np.ones((CONTEXT + 1, pair.spec.hidden_size), np.float32)
    for tokens, rows in ((TOKENS[:3], 3), (TOKENS[:1], 0), (TOKENS[:3], 1)):
        with pytest.raises(ValueError, match="don't fit"):
            head.forward(tokens, features[:rows])
    with pytest.raises(ContextLengthError, match="context of 128"):
        head.forward([5] * (CONTEXT + 1), features[:CONTEXT])
    assert list(head.tokens) == []
    head.forward(TOKENS[:3], features[:2])
    for length in (-1, 4):
        with pytest.raises(ValueError, match=r"0\.\.3"):
            head.truncate(length)
    head.truncate(0)
    head.forward([5] * CONTEXT, features[: CONTEXT - 1])


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    loaded = asyncio.run(load(pair, str(pair.head)))
    yield loaded
    asyncio.run(loaded.close())


async def load(pair: Pair, head: str) -> Engine:
    settings = load_settings(
        {"target": f"file:{pair.target}", "draft": "none", "head": head, "context_length": CONTEXT}
    )
    return await load_engine(settings, Device("push"), Senses(), lambda *_: None)


async def drafted(engine: Engine, request: GenerationRequest) -> tuple[list[int], set[str]]:
    """The answer, and who drafted for it."""
    tokens: list[int] = []
    drafters: set[str] = set()
    async with engine.session(request) as session:
        async for round in session.run():
            tokens += [event.token for event in round.tokens]
            drafters |= {round.draft.drafter} if round.draft.tokens else set()
    return tokens, drafters


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(seed=3)], ids=["greedy", "drawn"])
def test_an_engine_drafts_with_its_head_and_the_text_stays_the_same(engine: Engine, sampling: SamplingParams) -> None:
    prompt = tuple(TOKENS)

    async def both() -> tuple[list[int], list[int], set[str]]:
        direct, _ = await drafted(engine, GenerationRequest(prompt, 40, sampling, speculation=Speculation.OFF))
        engine.forget_prompts()  # the pool of past answers would draft first
        with_head, drafters = await drafted(engine, GenerationRequest(prompt, 40, sampling, speculation=Speculation.ON))
        return direct, with_head, drafters

    direct, with_head, drafters = asyncio.run(both())
    assert with_head == direct
    assert "head" in drafters


def test_requests_side_by_side_have_caches_of_their_own(engine: Engine) -> None:
    requests = [
        GenerationRequest(tuple(TOKENS[start:]), 30, SamplingParams(seed=start), speculation=Speculation.ON)
        for start in (0, 5, 9)
    ]

    async def answers(*, together: bool) -> list[list[int]]:
        engine.forget_prompts()
        if together:
            return [tokens for tokens, _ in await asyncio.gather(*(drafted(engine, each) for each in requests))]
        return [(await drafted(engine, each))[0] for each in requests]

    assert asyncio.run(answers(together=True)) == asyncio.run(answers(together=False))


def test_the_policy_knows_what_the_head_costs(engine: Engine) -> None:
    assert isinstance(engine.policy, PolicyEngine)
    assert engine.policy.drafters[-1] == HeadDrafter.name
    assert engine.policy.costs.draft_cost(HeadDrafter.name) > 0
    assert engine.policy.catch_up_s[HeadDrafter.name] > 0


def test_the_heads_caches_are_kept_and_forgotten_with_the_targets(engine: Engine) -> None:
    assert engine.heads is not None
    engine.forget_prompts()
    assert engine.num_cached_tokens == 0
    asyncio.run(drafted(engine, GenerationRequest(tuple(TOKENS), 12, SamplingParams(), speculation=Speculation.ON)))
    assert engine.heads.num_cached_tokens > len(TOKENS)
    assert engine.num_cached_tokens == engine.heads.num_cached_tokens + engine.target.slots.num_cached_tokens


def test_without_a_head_nothing_is_kept_and_nobody_asks(pair: Pair) -> None:
    async def without() -> Engine:
        loaded = await load(pair, "none")
        await loaded.close()
        return loaded

    loaded = asyncio.run(without())
    assert loaded.heads is None
    assert isinstance(loaded.policy, PolicyEngine)
    assert HeadDrafter.name not in loaded.policy.drafters
    assert not hasattr(loaded.target.slots.acquire(()), "hidden_states")


def test_a_head_for_another_target_stops_the_start(pair: Pair, tmp_path: Path) -> None:
    other = write_pair(tmp_path, seed=1)
    with pytest.raises(UnsupportedModelError, match="was trained for random qwen2"):
        asyncio.run(load(other, str(pair.head)))
    with pytest.raises(ModelFileError, match="no draft head"):
        asyncio.run(load(other, str(tmp_path / "nowhere")))


def test_a_shipped_head_is_found_by_its_targets_hash(pair: Pair, tmp_path: Path) -> None:
    assert packaged_head(pair.spec.target_sha256, tmp_path) is None
    shutil.copytree(pair.head, tmp_path / "heads" / "random")
    assert packaged_head(pair.spec.target_sha256, tmp_path / "heads") == tmp_path / "heads" / "random"
    assert packaged_head("0" * 64, tmp_path / "heads") is None
    assert choose_head("auto", pair.target) is None, "none is shipped for a random target"


def test_models_info_shows_a_head(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    print_model(str(pair.head), None)
    shown = " ".join(capsys.readouterr().out.split())
    assert "draft head" in shown
    assert "64 of 260 ids" in shown


@pytest.mark.model
def test_the_gap_rule_holds_with_a_random_head_on_a_real_model(smollm2_directory: Path, tmp_path: Path) -> None:
    spec = HeadSpec.of_target(smollm2_directory)
    write_head(tmp_path / "head", random_head(spec, num_ids=4096), spec)
    head = OnnxHead(
        open_head(tmp_path / "head", target=smollm2_directory),
        TargetEmbedding(smollm2_directory),
        context_length=1024,
    )
    lm = OnnxModel(smollm2_directory, context_length=1024).new_cache_with_hidden_states()
    tokenizer = Tokenizer.from_directory(smollm2_directory)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    thread = InferenceThread()
    try:
        gaps: list[float] = []
        noise = 0.0
        for scenario in built_in()[:3]:
            prompt = template.encode(tokenizer, [{"role": "user", "content": scenario.text}])
            drafter = HeadDrafter(head.new_cache(), lm, thread)
            direct, equal, gap = compare(lm, prompt, 32, 4, tokenizer.eos_ids, drafter)
            noise = max(noise, row_noise(lm, [*prompt, *direct], 5, len(prompt)))
            assert equal == len(direct) or gap is not None
            gaps += [] if gap is None else [gap]
        assert all(gap <= 2 * noise for gap in gaps), f"gaps {gaps} where rows differ by {noise}"
    finally:
        thread.stop()
