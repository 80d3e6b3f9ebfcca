"""On a real INT4 model, drafts change nothing but a near-tie: the gap rule over the built-in scenarios."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.losslessness import compare, row_noise
from edge_agent.scenarios import built_in
from shared.chat_template import ChatTemplate
from shared.onnx_lm import OnnxModel
from shared.tokenizer import Tokenizer

GAMMA = 4
NUM_TOKENS = 40


@pytest.mark.model
def test_the_gap_rule_holds_on_a_real_model(smollm2_directory: Path) -> None:
    lm = OnnxModel(smollm2_directory, context_length=1024).new_cache()
    tokenizer = Tokenizer.from_directory(smollm2_directory)
    template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    gaps: list[float] = []
    noise = 0.0
    for scenario in built_in()[:6]:
        prompt = template.encode(tokenizer, [{"role": "user", "content": scenario.text}])
        direct, equal, gap = compare(lm, prompt, NUM_TOKENS, GAMMA, tokenizer.eos_ids)
        noise = max(noise, row_noise(lm, [*prompt, *direct], GAMMA + 1, len(prompt)))
        if gap is not None:
            gaps.append(gap)
        else:
            assert equal == len(direct)
    assert all(gap <= 2 * noise for gap in gaps), f"gaps {gaps} where rows differ by {noise}"
