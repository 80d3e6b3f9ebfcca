"""Chat templates: as transformers renders them, control tokens from the template alone, refusals with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.chat_template import ChatTemplate
from shared.errors import BadRequestError, UnsupportedModelError
from shared.tokenizer import Tokenizer, write_tokenizer
from tests.llama_reference import LlamaReference

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "[{{ message['content'] | trim }}]{% endfor %}"
)
LOOKS_AT_CONTENT = (
    "{% for m in messages %}{% set content = m.content %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if content == 'skip' %}{% continue %}{% endif %}"
    "<|im_start|>{{ m.role }}{% if content.startswith('/') %} command{% endif %}{{ '\n' + content | trim }}<|im_end|>"
    "{% endfor %}"
)
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>"]
PARTS = [*SPECIALS, "<|im", "_end|>", "|>", "<", ">", "<|", "a", "B ", "\n", " ", "😀", "é", "</think>", "repo_name"]
CONTENTS = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(smollm2_gguf, directory)
    return Tokenizer.from_directory(directory)


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Iterator[LlamaReference]:
    reference = LlamaReference(smollm2_gguf)
    yield reference
    reference.close()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def own_template(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)


CONVERSATIONS = [
    [user("Hello")],
    [{"role": "system", "content": "Be brief.\n"}, user("  1 + 1?  "), assistant("2"), user("Danke! 😀\n\n")],
    [user(""), assistant("\n\n  x"), user(" ")],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_the_models_own_template_gives_llama_cpps_prompt(
    smollm2_tokenizer: Tokenizer, reference: LlamaReference, messages: list[dict[str, Any]]
) -> None:
    prompt = own_template(smollm2_tokenizer).render(messages)
    assert prompt == reference.apply_template(messages)
    ids = own_template(smollm2_tokenizer).encode(smollm2_tokenizer, messages)
    assert ids == reference.encode(prompt, allow_special=True)


@pytest.mark.parametrize("source", [CHATML, STRICT, LOOKS_AT_CONTENT, "{{ messages | tojson }}"])
@settings(max_examples=100)
@given(st.text(st.sampled_from("aB <|>/\n'1é😀") | st.characters(exclude_categories=["Cs"]), max_size=20))
def test_ordinary_content_is_encoded_as_the_whole_text_is(
    smollm2_tokenizer: Tokenizer, source: str, content: str
) -> None:
    template = ChatTemplate(source, "<|im_start|>", "<|im_end|>")
    messages = [user(content), assistant(content)]
    whole = smollm2_tokenizer.encode(template.render(messages), allow_special=True)
    assert template.encode(smollm2_tokenizer, messages) == whole


@pytest.mark.parametrize("source", [CHATML, LOOKS_AT_CONTENT])
@settings(max_examples=200)
@given(st.lists(CONTENTS, min_size=1, max_size=3))
def test_no_control_token_comes_from_content(smollm2_tokenizer: Tokenizer, source: str, contents: list[str]) -> None:
    template = ChatTemplate(source, None, None)
    ids = template.encode(smollm2_tokenizer, [user(content) for content in contents])
    controls = [i for i in ids if i in smollm2_tokenizer.special_ids]
    plain = template.encode(smollm2_tokenizer, [user("x") for _ in contents])
    assert controls == [i for i in plain if i in smollm2_tokenizer.special_ids]
    rendered = template.render([user(content) for content in contents])
    assert smollm2_tokenizer.decode(ids, skip_special=False) == rendered


def test_no_control_token_is_completed_by_the_templates_own_text(smollm2_tokenizer: Tokenizer) -> None:
    template = ChatTemplate("<{{ messages[0].content }}> <|{{ messages[1].content }}", None, None)
    messages = [user("|im_end|"), user("im_end|>")]
    ids = template.encode(smollm2_tokenizer, messages)
    assert smollm2_tokenizer.special_ids.isdisjoint(ids)
    assert smollm2_tokenizer.decode(ids) == "<|im_end|> <|im_end|>"


def test_no_control_token_comes_from_tools(smollm2_tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ tools | tojson }}{{ messages[0].tool_calls[0].function.arguments.a }}", None, None)
    call = {"function": {"name": "f", "arguments": '{"a": "<|im_end|>"}'}}
    tools = [{"function": {"name": "<|im_start|>", "parameters": {"<|im_end|>": 1}}}]
    ids = template.encode(smollm2_tokenizer, [{"role": "assistant", "content": None, "tool_calls": [call]}], tools)
    assert smollm2_tokenizer.special_ids.isdisjoint(ids)
    assert smollm2_tokenizer.decode(ids) == (
        '[{"function": {"name": "<|im_start|>", "parameters": {"<|im_end|>": 1}}}]<|im_end|>'
    )


def test_private_use_characters_in_content_survive(smollm2_tokenizer: Tokenizer) -> None:
    template = ChatTemplate(CHATML, None, None)
    content = "\ue000 <|im_end|> \ue001"
    ids = template.encode(smollm2_tokenizer, [user(content)], None, False)
    assert smollm2_tokenizer.decode(ids) == f"user\n{content}\n"
    everything = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(BadRequestError, match="private-use"):
        template.encode(smollm2_tokenizer, [user(everything)])


def test_conditions_on_content_hold() -> None:
    template = ChatTemplate(LOOKS_AT_CONTENT, None, None)
    rendered = template.render([assistant("<think>no</think>\n yes "), user("skip"), user("/help")])
    assert rendered == "<|im_start|>assistant\nyes<|im_end|><|im_start|>user command\n/help<|im_end|>"


def test_a_template_that_refuses_names_its_rule() -> None:
    template = ChatTemplate(STRICT, "<s>", None)
    assert template.render([user("a"), assistant(" b ")]) == "<s>[a][b]"
    with pytest.raises(BadRequestError, match="must alternate user/assistant") as caught:
        template.render([user("a"), user("b")])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ messages[9].content }}", "{{ 1 // 0 }}"])
def test_messages_that_a_template_can_not_render_are_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequestError, match="chat template"):
        ChatTemplate(source, None, None).render([user("a")])


def test_a_model_without_a_template_refuses_chat() -> None:
    with pytest.raises(BadRequestError, match=r"no chat template.*/v1/completions") as caught:
        ChatTemplate(None, None, None).render([user("a")])
    assert caught.value.code == "no_chat_template"


def test_a_template_that_is_none_is_refused_at_the_start() -> None:
    with pytest.raises(UnsupportedModelError, match="line 2"):
        ChatTemplate("a\n{% if %}", None, None)


@pytest.mark.parametrize("attack", ["messages.append(1)", "messages.__class__.__mro__[1].__subclasses__()"])
def test_a_template_can_not_reach_out(attack: str) -> None:
    with pytest.raises(BadRequestError):
        ChatTemplate(f"{{{{ {attack} }}}}", None, None).render([user("a")])


def test_templates_have_what_transformers_gives_them() -> None:
    source = (
        "{%- for m in messages %}\n    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {% generation %}\n{{ m.content }}{% endgeneration %}\n{% endfor %}"
        '{{ {"a": "<é>"} | tojson }} {{ strftime_now("%Y") | length }}'
    )
    assert ChatTemplate(source, None, None).render([user("a"), user("b")]) == 'a{"a": "<é>"} 4'


def test_text_parts_are_joined_and_other_parts_refused_by_name() -> None:
    template = ChatTemplate("{{ messages[-1].content }}", None, None)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([user(parts)]) == "one\ntwo"
    assert template.render([assistant(None)]) == ""
    with pytest.raises(BadRequestError, match="'image_url'") as caught:
        template.render([user("x"), user([{"type": "image_url", "image_url": {"url": "data:"}}])])
    assert caught.value.param == "messages.1.content"
