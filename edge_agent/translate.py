"""An OpenAI request as the engine sees it: ids, limits and wishes, each checked against the model."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from edge_agent.answer_grammar import CALL_OPEN, answer_grammar
from edge_agent.engine import Engine
from edge_agent.openai_schema import ChatRequest, CompletionRequest, SamplingFields
from edge_agent.request import Execution, GenerationRequest, Privacy, Speculation
from shared.constraint import UNCONSTRAINED, TokenConstraint
from shared.errors import BadRequestError, ContextLengthError, NotFoundError, UnsupportedFieldError
from shared.grammar import GrammarCompiler
from shared.sampling import AcceptanceRule, SamplingParams

SEED_SPACE = 2**64


class Translator:
    """Knows the model and the settings that a request is held against."""

    def __init__(self, engine: Engine, rule: AcceptanceRule, max_gamma: int) -> None:
        self._engine = engine
        self._rule = rule
        self._max_gamma = max_gamma
        self._grammars = GrammarCompiler(engine.tokenizer)

    def generation(
        self, body: ChatRequest | CompletionRequest, *, request_id: str = "", tenant: str = ""
    ) -> GenerationRequest:
        """The engine's request. Takes as long as encoding the prompt takes: not for the event loop.

        Raises:
            NotFoundError: another model was asked for.
            BadRequestError: the prompt or a value doesn't suit the model.
            UnsupportedFieldError: the answer can't be held to what it is asked to be.
            ContextLengthError: the prompt leaves no room for an answer.
        """
        if body.model is not None and body.model != self._engine.model_name:
            raise NotFoundError(
                f"no such model here; there is {self._engine.model_name}", param="model", code="model_not_found"
            )
        prompt = self._chat_prompt(body) if isinstance(body, ChatRequest) else self._text_prompt(body)
        room = self._engine.context_length - len(prompt)
        if room < 1:
            raise ContextLengthError(
                f"the context holds {self._engine.context_length} tokens, prompt and answer together; "
                f"the prompt alone has {len(prompt)}",
                param="messages" if isinstance(body, ChatRequest) else "prompt",
            )
        max_tokens = min(body.limit or room, room)
        options = body.souschef
        return GenerationRequest(
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=self._sampling(body),
            stop_ids=self._engine.tokenizer.eos_ids,
            num_top_logprobs=body.num_top_logprobs,
            prediction=self._prediction(body),
            execution=Execution(options.execution),
            speculation=Speculation(options.speculation),
            max_gamma=min(options.max_gamma, self._max_gamma),
            privacy=Privacy(options.privacy),
            constraint=self._constraint(body),
            request_id=request_id,
            tenant=tenant,
        )

    def _chat_prompt(self, body: ChatRequest) -> Sequence[int]:
        tools = [tool.for_template() for tool in body.offered_tools]
        if (tools or any(message.is_about_tools for message in body.messages)) and not self._knows_tools:
            raise UnsupportedFieldError(
                f"tools: the chat template of {self._engine.model_name} doesn't know them; "
                "leave them out, or serve a model that was trained on <tool_call>",
                param="tools" if tools else "messages",
            )
        messages = [message.for_template() for message in body.messages]
        return self._engine.chat_template.encode(self._engine.tokenizer, messages, tools)

    @property
    def _knows_tools(self) -> bool:
        """Whether the model calls in the form that we read, in text that reaches us."""
        written = self._engine.chat_template.mentions(CALL_OPEN)
        return written and CALL_OPEN not in self._engine.tokenizer.special_tokens

    def _constraint(self, body: ChatRequest | CompletionRequest) -> TokenConstraint:
        """What the answer is held to. The cloud can't be told of it: see `GenerationRequest.structured`."""
        grammar = answer_grammar(body) if isinstance(body, ChatRequest) else None
        if grammar is None:
            return UNCONSTRAINED
        if body.souschef.execution == "only_cloud":
            raise UnsupportedFieldError(
                "souschef.execution: answers held to a schema or to tools are made on the device, never 'only_cloud'",
                param="souschef.execution",
            )
        return self._grammars.compile(*grammar)

    def _text_prompt(self, body: CompletionRequest) -> Sequence[int]:
        """The prompt's ids. Text never becomes a control token; who sends ids knows what they do."""
        if isinstance(body.prompt, str):
            prompt = self._engine.tokenizer.encode(body.prompt, add_bos=True)
            if not prompt:
                raise BadRequestError("prompt must not be empty", param="prompt", code="invalid_value")
            return prompt
        if max(body.prompt) >= self._engine.tokenizer.vocab_size:
            raise BadRequestError(
                f"prompt holds ids past the vocabulary of {self._engine.tokenizer.vocab_size}",
                param="prompt",
                code="invalid_value",
            )
        return body.prompt

    def _prediction(self, body: ChatRequest | CompletionRequest) -> tuple[int, ...]:
        if not isinstance(body, ChatRequest) or body.prediction is None:
            return ()
        return tuple(self._engine.tokenizer.encode(body.prediction.text)[: self._engine.context_length])

    def _sampling(self, body: SamplingFields) -> SamplingParams:
        vocab_size = self._engine.tokenizer.vocab_size
        if any(token >= vocab_size for token in body.logit_bias):
            raise BadRequestError(
                f"logit_bias: ids must be under {vocab_size}", param="logit_bias", code="invalid_value"
            )
        return SamplingParams(
            temperature=body.temperature,
            top_k=min(max(body.top_k, 0), vocab_size),
            top_p=body.top_p,
            min_p=body.min_p,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=body.logit_bias,
            min_tokens=body.min_tokens,
            # Without a seed each request has a stream of its own.
            seed=secrets.randbelow(SEED_SPACE) if body.seed is None else body.seed % SEED_SPACE,
            rule=self._rule,
        )
