"""From settings to an engine that is ready: fetch, build, load, warm up, calibrate."""

from __future__ import annotations

import asyncio
import hashlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from edge_agent.calibration import CURVE_POSITIONS, measure_curve, measure_head, measure_prefill
from edge_agent.config import EdgeSettings
from edge_agent.cost_model import CostModel
from edge_agent.device import Device
from edge_agent.drafters import AnswerPool, HeadDrafter, ModelDrafter, NgramDrafter, PoolDrafter, PredictionDrafter
from edge_agent.engine import Engine, LocalModel
from edge_agent.head_choice import choose_head
from edge_agent.policy_controller import PolicyEngine, Senses
from edge_agent.thresholds import PRESETS, Preset, Thresholds, choose_preset
from shared.causal_lm import CausalLM
from shared.chat_template import ChatTemplate
from shared.draft_head import DraftHead
from shared.kv_slots import SlotPool
from shared.memory import release_freed_memory
from shared.models.cache import ModelCache
from shared.models.directory import open_model_directory
from shared.models.head import HeadDirectory
from shared.models.progress import ProgressListener
from shared.models.pull import pull
from shared.models.target_embedding import TargetEmbedding
from shared.onnx_head import OnnxHead
from shared.onnx_lm import OnnxModel
from shared.tokenizer import Tokenizer

DRAFT_POSITIONS = (1, 2)
"""A draft model draws one token a pass; it is fed two after every round that was accepted whole."""
LOOKUP_DRAFTERS = (PredictionDrafter.name, NgramDrafter.name, PoolDrafter.name)
ARM = ("aarch64", "arm64", "armv7l")


async def load_engine(settings: EdgeSettings, device: Device, senses: Senses, progress: ProgressListener) -> Engine:
    """An engine with its models in memory, warm and measured, on the device's own thread and energy meter.

    Raises:
        ModelError: a model can't be fetched, built or loaded.
        ConfigError: a setting names something that doesn't exist.
    """
    cache = ModelCache(settings.cache_dir)
    preset = choose_preset(settings.policy, is_arm=platform.machine() in ARM)
    target_path = await asyncio.to_thread(pull, settings.target, cache, progress=progress)
    draft_path = (
        await asyncio.to_thread(pull, settings.draft, cache, role="draft", progress=progress)
        if settings.has_draft
        else None
    )
    head = await asyncio.to_thread(choose_head, settings.head, target_path)
    new_target_cache = OnnxModel.new_cache if head is None else OnnxModel.new_cache_with_hidden_states
    thread = device.new_thread()
    try:
        target, curve = await thread.run(
            _load, settings, settings.target, target_path, CURVE_POSITIONS, progress, new_target_cache
        )
        # Without a draft model the device's target drafts for the cloud's larger one.
        draft_costs, catch_up_s, drafters = {ModelDrafter.name: curve[0]}, {ModelDrafter.name: 0.0}, [*LOOKUP_DRAFTERS]
        heads, draft = None, None
        if head is not None:
            heads = await thread.run(_load_head, settings, head, target_path, progress)
            cost = await thread.run(_head_cost, heads, head.manifest.feature_size)
            draft_costs[HeadDrafter.name], catch_up_s[HeadDrafter.name] = cost
            drafters.append(HeadDrafter.name)
        if draft_path is not None:
            draft, draft_curve = await thread.run(
                _load, settings, settings.draft, draft_path, DRAFT_POSITIONS, progress
            )
            draft_costs[ModelDrafter.name] = draft_curve[0]
            catch_up_s[ModelDrafter.name] = await thread.run(_prefill_cost, draft)
            drafters.append(ModelDrafter.name)
            if draft.tokenizer.fingerprint == target.tokenizer.fingerprint:
                draft = replace(draft, tokenizer=target.tokenizer)  # One in memory is enough.
        release_freed_memory()
        policy = PolicyEngine(
            CostModel(curve, draft_costs),
            _thresholds(settings, preset),
            drafters=drafters,
            cloud_drafters=(*LOOKUP_DRAFTERS, ModelDrafter.name),
            catch_up_s=catch_up_s,
            senses=senses,
            meter=device.new_meter(preset),
        )
        return Engine(
            target,
            draft,
            thread,
            policy,
            _template(target.tokenizer),
            _fingerprint(target_path, draft_path),
            AnswerPool(settings.answer_pool),
            heads,
        )
    except BaseException:
        thread.stop()
        raise


def _load(
    settings: EdgeSettings,
    reference: str,
    path: Path,
    positions: Sequence[int],
    progress: ProgressListener,
    new_cache: Callable[[OnnxModel], CausalLM] = OnnxModel.new_cache,
) -> tuple[LocalModel, list[float]]:
    """Load one model, warm it, and measure what its passes cost."""
    progress(f"loading {_name(reference)}", 0, 0)
    model = OnnxModel(path, context_length=settings.context_length, num_threads=settings.threads)
    # Its cache goes away again, and with it the memory of logits for the longest draft.
    curve = measure_curve(new_cache(model), positions=positions)
    local = LocalModel(
        _name(reference),
        Tokenizer.from_directory(path),
        SlotPool(partial(new_cache, model), settings.max_running),
        model.context_length,
        open_model_directory(path).weight_bytes,
    )
    return local, curve


def _prefill_cost(model: LocalModel) -> float:
    with model.slots.slot(()) as lm:
        return measure_prefill(lm)


def _load_head(
    settings: EdgeSettings, directory: HeadDirectory, target: Path, progress: ProgressListener
) -> SlotPool[DraftHead]:
    progress(f"loading the draft head {directory.path.name}", 0, 0)
    head = OnnxHead(
        directory,
        TargetEmbedding(target),
        context_length=settings.context_length,
        num_threads=settings.threads,
    )
    return SlotPool(head.new_cache, settings.max_running)


def _head_cost(heads: SlotPool[DraftHead], feature_size: int) -> tuple[float, float]:
    """Seconds of a draft token, and seconds a token of catching up."""
    with heads.slot(()) as head:
        return measure_head(head, feature_size)


def _thresholds(settings: EdgeSettings, preset: Preset) -> Thresholds:
    """The preset's numbers, with the objective that the settings ask for."""
    thresholds = PRESETS[preset]
    return thresholds if settings.objective is None else thresholds.model_copy(update={"objective": settings.objective})


def _name(reference: str) -> str:
    """What the API calls a model: the catalogue's name, or the file's without its ending."""
    return Path(reference.rsplit("/", 1)[-1].removeprefix("file:").removeprefix("hf:")).name.removesuffix(".gguf")


def _template(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)


def _fingerprint(*paths: Path | None) -> str:
    """Changes when a model or how it was built changes: OpenAI's `system_fingerprint`."""
    names = "|".join(path.name for path in paths if path is not None)
    return "fp_" + hashlib.sha256(names.encode()).hexdigest()[:12]
