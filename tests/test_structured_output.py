"""A grammar on a real model: the answer parses, and where drafts change it the target hesitated."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.losslessness import answer, row_noise
from edge_agent.answer_grammar import answer_grammar
from edge_agent.drafters import NgramDrafter, NullDrafter
from edge_agent.openai_schema import ChatRequest
from edge_agent.request import GenerationRequest
from shared.acceptance import common_prefix_length
from shared.chat_template import ChatTemplate
from shared.grammar import GrammarCompiler
from shared.onnx_lm import OnnxModel
from shared.sampling import SamplingParams
from shared.tokenizer import Tokenizer

INGREDIENT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "grams": {"type": "integer"}},
    "required": ["name", "grams"],
    "additionalProperties": False,
}
RECIPE = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "ingredients": {"type": "array", "items": INGREDIENT, "maxItems": 6}},
    "required": ["title", "ingredients"],
    "additionalProperties": False,
}
GAMMA = 4


@pytest.mark.model
@pytest.mark.slow
def test_json_of_a_real_model_with_and_without_drafts(qwen05_directory: Path) -> None:
    lm = OnnxModel(qwen05_directory, context_length=1024).new_cache()
    tokenizer = Tokenizer.from_directory(qwen05_directory)
    body = ChatRequest.model_validate(
        {
            "messages": [{"role": "user", "content": "A recipe for pancakes."}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "recipe", "schema": RECIPE}},
        }
    )
    template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    prompt = template.encode(tokenizer, [message.for_template() for message in body.messages])
    grammar = answer_grammar(body)
    assert grammar is not None
    constraint = GrammarCompiler(tokenizer).compile(*grammar)
    request = GenerationRequest(
        tuple(prompt), 400, SamplingParams(temperature=0), tokenizer.eos_ids, constraint=constraint
    )
    direct = asyncio.run(answer(lm, request, 0, NullDrafter()))
    speculative = asyncio.run(answer(lm, request, GAMMA, NgramDrafter()))
    for tokens in (direct, speculative):
        recipe = json.loads(tokenizer.decode(tokens))
        assert set(recipe) == {"title", "ingredients"}
        assert all(isinstance(each["grams"], int) for each in recipe["ingredients"])
    equal = common_prefix_length(direct, speculative)
    if equal < len(direct):
        state = constraint.fork()
        for token in direct[:equal]:
            state.append(token)
        noise = row_noise(lm, [*prompt, *direct], GAMMA + 1, len(prompt))
        lm.truncate(0)
        logits = lm.forward([*prompt, *direct[:equal]], 1)[0]
        best = np.sort(logits[state.mask()[: len(logits)]])
        assert best[-1] - best[-2] <= 2 * noise
