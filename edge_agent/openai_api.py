"""OpenAI's routes: validate, translate, then answer whole or as a stream."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from edge_agent.agent import Agent
from edge_agent.completion import Completion
from edge_agent.event_stream import DONE, EventStream, Frames
from edge_agent.http_errors import ERRORS
from edge_agent.openai_response import (
    ChatCompletion,
    ChatShape,
    Head,
    ResponseShape,
    StreamChunks,
    TextCompletion,
    TextShape,
)
from edge_agent.openai_schema import ChatRequest, CompletionRequest
from edge_agent.piece import LoggedToken
from edge_agent.round import FinishReason
from edge_agent.tool_calls import AnswerReader, CallReader, PlainReader
from shared.errors import NotFoundError
from shared.http import ClientLeftError, run_until_disconnect
from shared.sse import frame
from shared.tokenizer import Tokenizer

CLIENT_CLOSED_REQUEST = 499
"""nginx's word for a client that left; nobody reads it but the access log."""

router = APIRouter(responses=ERRORS)

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A JSON body, or with `stream: true` server-sent events.",
        "content": {"text/event-stream": {}},
    }
}


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    names = {tool.function.name for tool in body.offered_tools}
    reader: AnswerReader = CallReader(names) if names else PlainReader()
    return await _complete(body, request, "chatcmpl", partial(ChatShape, reader=reader))


@router.post("/v1/completions", response_model=TextCompletion, responses=STREAMED)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue a text."""
    return await _complete(body, request, "cmpl", TextShape)


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The models of this device: the one that answers, and the one that drafts for it."""
    return {"object": "list", "data": _models(agent_of(request))}


@router.get("/v1/models/{model:path}")
async def get_model(model: str, request: Request) -> dict[str, Any]:
    """One model."""
    for entry in _models(agent_of(request)):
        if entry["id"] == model:
            return entry
    raise NotFoundError("no such model here", param="model", code="model_not_found")


def agent_of(request: Request) -> Agent:
    """The agent of the application that the request came to."""
    agent = request.app.state.agent
    assert isinstance(agent, Agent)
    return agent


async def _complete(
    body: ChatRequest | CompletionRequest,
    request: Request,
    prefix: str,
    shape_of: Callable[[Head, Tokenizer, bool], ResponseShape],
) -> Response:
    agent = agent_of(request)
    arrived = agent.clock()
    request_id = f"{prefix}-{uuid.uuid4().hex}"
    generation = await asyncio.to_thread(
        agent.translator.generation, body, request_id=request_id, tenant=request.state.tenant
    )
    head = Head(request_id, int(time.time()), agent.engine.model_name, agent.engine.system_fingerprint)
    shape = shape_of(head, agent.engine.tokenizer, generation.num_top_logprobs is not None)
    continues = isinstance(body, CompletionRequest)
    completion = Completion(agent, generation, arrived=arrived, stop=body.stop, continues=continues)
    try:
        if not body.stream:
            return JSONResponse(await run_until_disconnect(request.receive, _whole(completion, shape)))
        frames = _frames(completion, StreamChunks(head, shape, body.include_usage))
        first = await run_until_disconnect(request.receive, _first(frames))
    except ClientLeftError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return EventStream(first, frames, ping_s=agent.settings.ping_s, stall_s=agent.settings.stall_s)


async def _whole(completion: Completion, shape: ResponseShape) -> Any:
    text: list[str] = []
    logged: list[LoggedToken] = []
    finish_reason = FinishReason.STOP
    async with completion.open() as pieces:
        async for piece in pieces:
            text.append(piece.text)
            logged.extend(piece.logprobs)
            finish_reason = piece.finish_reason or finish_reason
    return shape.whole("".join(text), logged, finish_reason, completion.tally)


async def _first(frames: Frames) -> bytes:
    """The first frame: once it is there the request has its place, and no error of admission can follow."""
    try:
        return await anext(frames)
    except BaseException:
        await frames.aclose()
        raise


async def _frames(completion: Completion, chunks: StreamChunks) -> Frames:
    finish_reason = FinishReason.STOP
    async with completion.open() as pieces:
        yield frame(chunks.opening())
        async for piece in pieces:
            finish_reason = piece.finish_reason or finish_reason
            chunk = chunks.delta(piece.text, piece.logprobs, last=piece.finish_reason is not None)
            if chunk is not None:
                yield frame(chunk)
    # The place is free again: a client that is slow to take the end keeps nobody waiting.
    for chunk in chunks.closing(finish_reason, completion.tally):
        yield frame(chunk)
    yield DONE


def _models(agent: Agent) -> list[dict[str, Any]]:
    engine = agent.engine
    roles = {engine.model_name: "target"} | ({engine.draft.name: "draft"} if engine.draft else {})
    return [
        {
            "id": name,
            "object": "model",
            "created": engine.created,
            "owned_by": "souschef",
            "souschef": {"role": role, "context_length": engine.context_length},
        }
        for name, role in roles.items()
    ]
