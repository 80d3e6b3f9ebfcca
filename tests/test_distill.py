"""Making a draft head: each stage on a small random target, and the whole command on the smallest real one."""
# ruff: noqa: E402 (without PyTorch the imports of what needs it are never reached)

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="distilling needs PyTorch: make setup-train")

from edge_agent.distill.answers import AnswerLimits, answer_prompts, is_stuck
from edge_agent.distill.distillation_loss import Projections, agreement, loss_slopes
from edge_agent.distill.evaluation import measure_acceptance
from edge_agent.distill.head_module import HeadModule
from edge_agent.distill.initial_head import continued_head, initial_head, projection_rows
from edge_agent.distill.moved_head import moved_head
from edge_agent.distill.prompts import Prompt
from edge_agent.distill.recipe import Distillation, Machine, Recipe
from edge_agent.distill.rounding import rounded, rounded_matrices
from edge_agent.distill.shards import Record, ShardFolder
from edge_agent.distill.torch_target import TorchTarget
from edge_agent.distill.trainer import Trainer, TrainingPlan
from edge_agent.distill.training_data import batches, is_held_out, to_batch
from edge_agent.distill.trimmed_vocabulary import trim_vocabulary
from shared.errors import ModelError
from shared.models.build import build_model
from shared.models.head import HEAD_PRECISION, HeadSpec, open_head, read_head_weights, write_head
from shared.models.progress import NullProgress
from shared.models.quantise import dequantise, quantise
from shared.models.target_embedding import TargetEmbedding
from shared.onnx_head import OnnxHead
from shared.onnx_lm import OnnxModel
from shared.tokenizer import Tokenizer
from tests.random_decoder import DecoderShape, write_random_decoder
from tests.random_head import as_stored, random_head

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
CONTEXT = 160
CPU = torch.device("cpu")
MACHINE = Machine(CPU, num_rows=3, num_workers=1)
LIMITS = AnswerLimits(None, max_answer=20, num_rows=3, num_workers=1, shard_positions=150)


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
def any_target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _built(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _built(tmp_path_factory.mktemp("target"), "qwen2")


def _built(folder: Path, architecture: str, **sizes: int) -> Path:
    kinds = {"token_embd": "Q8_0"}
    shape = DecoderShape(architecture, **sizes)
    write_random_decoder(folder / "t.gguf", shape, kinds=kinds, chat_template=TEMPLATE)
    build_model(folder / "t.gguf", folder / "built", progress=lambda _stage, _done: None)
    return folder / "built"


@pytest.fixture(scope="module")
def records(target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    folder = ShardFolder(tmp_path_factory.mktemp("answers"))
    _answer(target, folder, _prompts(40))
    return list(folder.records())


def _prompts(count: int) -> list[Prompt]:
    return [
        Prompt(index=n, kind="k", turns=(f"say {n}", f"and {n * 7}")[: 1 + n % 2], is_sampled=n % 4 == 3)
        for n in range(count)
    ]


def _answer(
    target: Path,
    folder: ShardFolder,
    prompts: Sequence[Prompt],
    progress: Callable[[str, float, float], None] = NullProgress(),
) -> None:
    loaded = TorchTarget(target, CONTEXT, LIMITS.num_rows, CPU)
    answer_prompts(prompts, folder, loaded, Tokenizer.from_directory(target), LIMITS, seed=1, progress=progress)


# --- answers


def test_the_target_in_torch_computes_what_the_product_does(any_target: Path) -> None:
    """Sequences of different lengths in one batch; int8 activations there, bfloat16 here."""
    sequences = [list(range(5, 5 + length)) for length in (3, 17, 9)]
    loaded = TorchTarget(any_target, CONTEXT, 3, CPU)
    cache = loaded.new_cache(3)
    for row, tokens in enumerate(sequences):
        loaded.forward(cache, slice(row, row + 1), [tokens], [0])
    states = loaded.forward(cache, slice(0, 3), [[40], [41], [42]], [len(tokens) for tokens in sequences])
    logits = loaded.logits(states[:, 0]).float().numpy()
    product = OnnxModel(any_target, context_length=CONTEXT, num_threads=1)
    for row, tokens in enumerate(sequences):
        expected = product.new_cache().forward([*tokens, 40 + row], 1)[0]
        assert np.corrcoef(logits[row], expected)[0, 1] > 0.99


def test_each_answer_is_the_targets_own_and_has_its_states(target: Path, records: list[Record]) -> None:
    assert sorted(record.prompt_index for record in records) == list(range(40))
    loaded = TorchTarget(target, CONTEXT, 1, CPU)
    for record in records[:6]:
        tokens = [int(token) for token in record.tokens]
        states = loaded.forward(loaded.new_cache(1), slice(0, 1), [tokens[:-1]], [0])[0]
        assert np.abs(states.numpy() - record.states.astype(np.float32)).max() < 0.15
        if record.prompt_index % 4 != 3:
            chosen = loaded.logits(states).float()
            places = np.flatnonzero(record.is_answer[1:])
            best = chosen[places].max(-1).values
            taken = chosen[places, record.tokens[places + 1].astype(np.int64)]
            assert float((best - taken).max()) < 0.3  # bfloat16 ties may fall otherwise in another batch


def test_a_second_turn_goes_on_from_the_first_answer(target: Path, records: list[Record]) -> None:
    tokenizer = Tokenizer.from_directory(target)
    record = next(record for record in records if record.prompt_index == 1)
    text = tokenizer.decode(record.tokens.tolist(), skip_special=False)
    assert text.count("<|im_start|>assistant") == 2
    assert "say 1" in text
    assert "and 7" in text
    assert 20 < record.num_answer_tokens <= 40


def test_an_interrupted_run_goes_on_and_loses_or_doubles_nothing(target: Path, tmp_path: Path) -> None:
    folder, finished = ShardFolder(tmp_path), []

    def interrupt(_stage: str, done: float, _total: float) -> None:
        finished.append(done)
        if len(finished) == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _answer(target, folder, _prompts(40), interrupt)
    kept = {record.prompt_index: record for record in folder.records()}
    assert 10 < len(kept) < 40
    _answer(target, folder, _prompts(40))
    after = list(folder.records())
    assert sorted(record.prompt_index for record in after) == list(range(40))
    for record in after[: len(kept)]:
        assert np.array_equal(record.tokens, kept[record.prompt_index].tokens)


def test_a_run_killed_while_it_writes_a_shard_loses_only_that_one(target: Path, tmp_path: Path) -> None:
    """SIGKILL after the second shard's states are there and before the file that makes them count."""
    code = f"""
import os, signal
from pathlib import Path
import edge_agent.distill.shards as shards
from shared.models.cache import write_atomically
def write(path, content):
    if path.name == "00001.npz":
        os.kill(os.getpid(), signal.SIGKILL)
    write_atomically(path, content)
shards.write_atomically = write
from tests.test_distill import _answer, _prompts
_answer(Path({str(target)!r}), shards.ShardFolder(Path({str(tmp_path)!r})), _prompts(40))
"""
    run = subprocess.run([sys.executable, "-c", code], timeout=300, capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    assert (tmp_path / "00001.states.npy").exists()
    folder = ShardFolder(tmp_path)
    first = [record.prompt_index for record in folder.records()]
    assert 0 < len(first) < 40
    _answer(target, folder, _prompts(40))
    assert sorted(record.prompt_index for record in folder.records()) == list(range(40))


def test_a_run_that_is_told_to_stop_keeps_what_it_has(tmp_path: Path) -> None:
    """Conversations in flight, too, as far as they went."""
    _built(tmp_path, "qwen2", context=2048)  # a byte is a token here
    command = [sys.executable, "-m", "edge_agent", "distill", f"file:{tmp_path / 't.gguf'}"]
    command += ["--output", str(tmp_path / "head")]
    command += ["--folder", str(tmp_path / "work"), "--cache-dir", str(tmp_path / "cache"), "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        assert any("the target answers" in line for line in run.stderr), "it ended before it answered"
        run.send_signal(signal.SIGTERM)
        said = run.stderr.read()
    assert run.returncode not in (0, -signal.SIGTERM), said
    assert "Traceback" not in said
    kept = list(ShardFolder(tmp_path / "work" / "answers").records())
    assert sum(record.num_answer_tokens for record in kept) > 0


def test_an_answer_that_repeats_itself_is_cut() -> None:
    phrase = list(range(40))
    assert is_stuck([*phrase, *phrase])
    assert not is_stuck([*phrase, *range(100, 140)])
    assert is_stuck([7] * 64)


# --- the head


@pytest.mark.parametrize("is_moved", [False, True])
def test_the_trained_layer_is_the_graph(target: Path, tmp_path: Path, records: list[Record], is_moved: bool) -> None:
    """At every depth: the features and logits of training are those of drafting with the files that ship."""
    spec = HeadSpec.of_target(target)
    if is_moved:
        spec = replace(spec, hidden_size=48, num_heads=6, num_kv_heads=3, is_moved=True)
    weights = random_head(spec)
    write_head(tmp_path / "head", weights, spec, accuracy_level=0)
    embedding = TargetEmbedding(target)
    head = OnnxHead(open_head(tmp_path / "head", target=target), embedding, context_length=CONTEXT, num_threads=1)
    record = records[0]
    module = HeadModule(as_stored(weights), spec)
    batch = to_batch([record, records[1]], [True, True], embedding, CPU)
    with torch.no_grad():
        levels = list(module.unroll(batch, 3))
        logits = [module.output(x) @ module.lm_head.T for x, _ in levels]
    tokens, features = [int(token) for token in record.tokens], record.states.astype(np.float32)
    cache = head.new_cache()
    for known in (2, 3, 7, 12):  # tokens before the draft; what is drafted are the record's own next ones
        cache.truncate(0)
        output = cache.forward(tokens[:known], features[: known - 1])
        for depth in range(3):
            place = known - 2 + depth
            assert bool(levels[depth][1][0, place])
            x = levels[depth][0][0, place]
            mine = (x if module.expansion is None else module.expansion @ x).detach().numpy()
            assert np.abs(mine - output.features[0]).max() < 1e-3 * np.abs(mine).max()
            expected = output.logits[weights.vocabulary]
            assert np.abs(logits[depth][0, place].numpy() - expected).max() < 2e-3 * np.abs(expected).max()
            output = cache.forward([tokens[known + depth]], output.features)


def test_the_slope_is_that_of_the_cross_entropy_to_the_target() -> None:
    generator = torch.Generator().manual_seed(0)
    states, projection = torch.randn(2, 5, 8, generator=generator), torch.randn(30, 8, generator=generator)
    outputs = [torch.randn(2, 5, 8, generator=generator).requires_grad_() for _ in range(2)]
    learned = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    chained = [learned, learned & torch.tensor([False, True, True, True, True])]
    wanted = torch.softmax(states @ projection.T, -1)
    each = [-(wanted * torch.log_softmax(x @ projection.T, -1)).sum(-1) for x in outputs]
    loss = (each[0][chained[0]].sum() + 0.5 * each[1][chained[1]].sum()) / 8
    same = Projections(projection, projection)
    slopes = loss_slopes(outputs, chained, states, same, (1.0, 0.5))
    for mine, theirs in zip(slopes, torch.autograd.grad(loss, outputs), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    found = agreement(outputs, chained, states, same)
    agrees = [(x @ projection.T).argmax(-1) == wanted.argmax(-1) for x in outputs]
    assert found.loss == pytest.approx(float(each[0][learned].sum().detach()), rel=1e-5)
    assert found.reached == [8, int((agrees[0][:, :-1] & chained[1][:, 1:]).sum())]
    assert found.accepted[0] == int((agrees[0] & learned).sum())


def test_training_lowers_the_loss_and_goes_on_from_its_checkpoint(
    target: Path, records: list[Record], tmp_path: Path
) -> None:
    plan = TrainingPlan(epochs=6, batch_positions=600, depth_weights=(1.0, 0.5), held_out=0.1, peak_rate=3e-3)
    steps: list[float] = []
    whole = _trainer(target, records, plan)
    before = whole.evaluate()
    whole.train(tmp_path / "whole.pt", NullProgress())
    assert whole.evaluate().loss < before.loss - 0.05

    def interrupt(_stage: str, done: float, _total: float) -> None:
        if done > 0.4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _trainer(target, records, plan).train(tmp_path / "part.pt", interrupt, save_every=3)
    resumed = _trainer(target, records, plan)
    resumed.train(tmp_path / "part.pt", NullProgress(), save_every=3)
    assert resumed.step == whole.step
    for name, parameter in whole.head.named_parameters():
        assert torch.allclose(parameter, dict(resumed.head.named_parameters())[name], atol=1e-5), name
    fewer = _trainer(target, records[:30], plan)
    fewer.train(tmp_path / "whole.pt", lambda _stage, done, _total: steps.append(done))
    assert len(steps) == fewer.num_steps  # another training's checkpoint is left alone


def test_rounded_weights_are_stored_without_loss() -> None:
    weights = torch.randn(24, 384, generator=torch.Generator().manual_seed(2))
    weights[0] = 0
    weights[1] = weights[1].abs()  # a range that begins at zero
    found = rounded(weights, HEAD_PRECISION)
    assert len(torch.unique(found[5, : HEAD_PRECISION.block])) <= 16
    assert 0 < float((found - weights).abs().max()) < 0.6 * float(weights.max() - weights.min()) / 15
    stored = dequantise(quantise(found.numpy(), HEAD_PRECISION))
    np.testing.assert_allclose(stored, found.numpy(), atol=1e-6)


def test_matrices_are_rounded_only_within(target: Path, records: list[Record]) -> None:
    trainer = _trainer(target, records, TrainingPlan(held_out=0.1))
    before = {name: parameter.clone() for name, parameter in trainer.head.named_parameters()}
    with rounded_matrices(trainer.head, HEAD_PRECISION):
        within = {name: parameter.clone() for name, parameter in trainer.head.named_parameters()}
    for name, parameter in trainer.head.named_parameters():
        assert torch.equal(parameter, before[name]), name
        is_rounded = parameter.requires_grad and parameter.dim() > 1
        assert torch.equal(within[name], before[name]) != is_rounded, name


def test_a_head_is_trained_further(target: Path, records: list[Record], tmp_path: Path) -> None:
    """From what it learned, with other ids; a head of another target is refused."""
    plan = TrainingPlan(epochs=6, batch_positions=600, held_out=0.1, peak_rate=3e-3)
    trainer = _trainer(target, records, plan)
    untrained = trainer.evaluate()
    trainer.train(tmp_path / "first.pt", NullProgress())
    write_head(tmp_path / "head", trainer.head.weights(), trainer.head.spec)
    fewer = trim_vocabulary(records, trainer.head.spec.vocab_size, 150)
    head = open_head(tmp_path / "head", target=target)
    further = HeadModule(continued_head(target, head, fewer.ids), trainer.head.spec)
    assert further.lm_head.shape[0] == 150
    found = _training(further, target, records, plan).evaluate()
    assert found.loss < (untrained.loss + trainer.evaluate().loss) / 2
    other = _built(tmp_path, "llama")
    with pytest.raises(ModelError):
        Distillation(other, tmp_path, Recipe(start_from=tmp_path / "head"), MACHINE, NullProgress())


def test_a_head_moved_to_the_same_features_says_the_same(target: Path, records: list[Record], tmp_path: Path) -> None:
    """Fitting finds the features that it had, for each draft token."""
    spec = HeadSpec.of_target(target)
    write_head(tmp_path / "head", random_head(spec, num_ids=200), spec)
    head = open_head(tmp_path / "head", target=target)
    before = HeadModule(read_head_weights(head), spec)
    weights = moved_head(head, target, target, records, num_threads=1)
    after = HeadModule(weights, replace(spec, is_moved=True))
    batch = to_batch(records[:4], [True] * 4, TargetEmbedding(target), CPU)
    with torch.no_grad():
        for (x, chained), (y, _) in zip(before.unroll(batch, 3), after.unroll(batch, 3), strict=True):
            wanted, found = ((module.output(z) @ before.lm_head.T)[chained] for module, z in ((before, x), (after, y)))
            assert float((wanted.argmax(-1) == found.argmax(-1)).float().mean()) > 0.9
            assert float(torch.corrcoef(torch.stack([wanted.flatten(), found.flatten()]))[0, 1]) > 0.98


def test_a_head_of_a_smaller_model_is_moved_and_trained(target: Path, records: list[Record], tmp_path: Path) -> None:
    """To a target of another size with the same tokens; the files draft, go on being trained, and are this target's."""
    smaller = _built(tmp_path, "qwen3", hidden=32, heads=2, kv_heads=1)
    small_spec = HeadSpec.of_target(smaller)
    write_head(tmp_path / "small-head", random_head(small_spec, num_ids=200), small_spec)
    plan = TrainingPlan(epochs=8, batch_positions=600, held_out=0.1, peak_rate=3e-3)
    recipe = Recipe(plan=plan, start_from=tmp_path / "small-head", made_for=smaller, max_ids=240)
    run = Distillation(target, tmp_path / "work", recipe, MACHINE, NullProgress())
    assert (run.spec.feature_size, run.spec.hidden_size, run.spec.num_heads) == (64, 32, 2)
    trained = run.train(records)
    assert trained.report.loss < trained.untrained.loss - 0.05
    run.export(trained, tmp_path / "head")
    head = open_head(tmp_path / "head", target=target)
    assert head.manifest.is_moved
    assert len(head.vocabulary) == 240
    assert set(open_head(tmp_path / "small-head").vocabulary) <= set(head.vocabulary)
    np.testing.assert_allclose(trained.weights.lm_head, projection_rows(smaller, head.vocabulary).numpy(), atol=1e-6)
    with pytest.raises(ModelError):
        open_head(tmp_path / "head", target=smaller)
    greedy = [record for record in records if record.prompt_index % 4 != 3]
    found = measure_acceptance(
        tmp_path / "head", target, greedy, lambda _record: "all", num_threads=1, context_length=CONTEXT
    )["all"]
    assert found.reached[0] > 100
    further = Distillation(
        target, tmp_path / "more", Recipe(plan=plan, start_from=tmp_path / "head"), MACHINE, NullProgress()
    )
    assert further.spec.is_moved
    gone_on = further.train(records)
    assert gone_on.untrained.loss < trained.untrained.loss
    np.testing.assert_array_equal(gone_on.vocabulary.ids, head.vocabulary)


def test_two_workers_learn_from_a_batch_each(target: Path, records: list[Record], tmp_path: Path) -> None:
    plan = TrainingPlan(epochs=6, batch_positions=300, depth_weights=(1.0,), held_out=0.1, peak_rate=3e-3)
    trainer = _trainer(target, records, replace(plan, num_workers=2))
    before = trainer.evaluate()
    trainer.train(tmp_path / "two.pt", NullProgress())
    assert trainer.num_steps < _trainer(target, records, plan).num_steps
    assert trainer.evaluate().loss < before.loss


def test_batches_hold_every_record_once_within_their_size(records: list[Record]) -> None:
    made = batches(records, 400, np.random.default_rng(0))
    assert sorted(record.prompt_index for batch in made for record in batch) == list(range(40))
    assert all(len(batch) * max(len(record.tokens) for record in batch) <= 400 for batch in made)


def test_the_shipped_files_accept_as_training_said(target: Path, records: list[Record], tmp_path: Path) -> None:
    """What is measured on the quantised files is near what the trainer reports for the same answers."""
    plan = TrainingPlan(epochs=8, batch_positions=600, held_out=0.1, peak_rate=3e-3)
    trainer = _trainer(target, records, plan)
    trainer.train(tmp_path / "t.pt", NullProgress())
    write_head(tmp_path / "head", trainer.head.weights(), trainer.head.spec, accuracy_level=0)
    greedy = [record for record in records if record.prompt_index % 4 != 3]
    found = measure_acceptance(
        tmp_path / "head", target, greedy, lambda _record: "all", num_threads=1, context_length=CONTEXT
    )["all"]
    trainer.held_out = greedy
    assert abs(found.rate(0) - trainer.evaluate().acceptance[0]) < 0.15
    assert found.reached[1] <= found.accepted[0]


def _trainer(target: Path, records: list[Record], plan: TrainingPlan) -> Trainer:
    spec = HeadSpec.of_target(target)
    learned = [record for record in records if not is_held_out(record, plan.held_out)]
    vocabulary = trim_vocabulary(learned, spec.vocab_size, 200)
    return _training(HeadModule(initial_head(target, spec, vocabulary.ids, learned), spec), target, records, plan)


def _training(head: HeadModule, target: Path, records: list[Record], plan: TrainingPlan) -> Trainer:
    wanted = projection_rows(target, head.vocabulary.numpy())
    return Trainer(head, TargetEmbedding(target), wanted, records, plan, seed=1, device=CPU)


# --- the command


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_distill_makes_a_head_that_drafts_from_nothing(smollm2_directory: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"category": "chat", "turns": ["Tell me about the sea."]}\n')
    command = [sys.executable, "-m", "edge_agent", "distill", "smollm2-135m-instruct", "--output", "head"]
    command += ["--folder", "work", "--answer-tokens", "5000", "--epochs", "4", "--max-ids", "4096"]
    command += ["--prompts", "prompts.jsonl"]
    first = subprocess.run(command, cwd=tmp_path, timeout=1500, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    head = open_head(tmp_path / "head", target=smollm2_directory)
    assert head.manifest.total_bytes < 25e6
    records = list(ShardFolder(tmp_path / "work" / "answers").records())
    assert sum(record.num_answer_tokens for record in records) >= 5000
    found = measure_acceptance(
        head.path, smollm2_directory, records[:20], lambda _record: "all", num_threads=2, context_length=1024
    )["all"]
    assert found.rate(0) > 0.05  # more than the commonest token alone
    again = subprocess.run(command, cwd=tmp_path, timeout=300, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "the target answers" not in again.stderr  # nothing is answered twice
