"""The rest of an answer, made here, token by token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from cloud_service.admission import Admission
from cloud_service.metrics import CloudMetrics
from cloud_service.target import Target
from shared.acceptance import Draft
from shared.protocol import ContinueRequest, Finish, FinishFrame, TokenFrame, WireLogprobs
from shared.sampling import Sampler


class AnswerGenerator:
    """Serves /v1/continue. Stateless between requests: all that a continuation needs, it brings along."""

    def __init__(
        self, target: Target, admission: Admission, metrics: CloudMetrics, num_active: Callable[[], int]
    ) -> None:
        """num_active: verifying sessions, for the load that is reported at the end."""
        self._num_active = num_active
        self._target = target
        self._admission = admission
        self._metrics = metrics

    async def generate(self, request: ContinueRequest) -> AsyncGenerator[TokenFrame | FinishFrame, None]:
        """The tokens until a stop id (which is sent), the limit, or the context's end; then how it ended.

        Raises:
            BadRequestError, ContextLengthError, OverloadedError: before the first token.
            EngineError: inference failed.
        """
        opening = request.opening
        tokens = list(opening.tokens)
        self._target.check(tokens, 1)
        sampler = Sampler(
            opening.sampling,
            stop_ids=opening.stop_ids,
            prompt=tokens[: opening.prompt_len],
            generated=tokens[opening.prompt_len :],
        )
        end = min(len(tokens) + request.max_tokens, self._target.context_length)
        token: int | None = None
        async with self._admission.place(), self._target.stream(tokens) as lm:
            while len(tokens) < end and token not in opening.stop_ids:
                last = len(tokens) + 1 == end
                verdict = await self._target.judge(lm, tokens, Draft(), sampler, opening.logprobs, comes_again=not last)
                token = verdict.next_token
                self._metrics.generated_tokens.inc()
                logprobs = WireLogprobs.of(verdict.logprobs[0]) if verdict.logprobs else None
                yield TokenFrame(position=len(tokens), token=token, logprobs=logprobs)
                tokens.append(token)
                sampler.append(token)
        finish: Finish = "stop" if token in opening.stop_ids else "length"
        yield FinishFrame(finish=finish, load=self._target.meter.load(self._num_active()))
