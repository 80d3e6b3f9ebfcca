"""Bytes from the network: the event stream's parser, the protocol's messages, a cloud that answers anything."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from edge_agent.cloud_client import _error_message, _parse_frame
from edge_agent.tool_calls import CallReader
from shared.chat_template import ChatTemplate
from shared.errors import BadRequestError, CloudError, SouschefError
from shared.protocol import ContinueRequest, HandshakeReply, HandshakeRequest, Message, VerifyReply, VerifyRequest
from shared.sse import SseParser, frame
from tests.cloud_edge import cloud_client
from tests.fuzzing import examples
from tests.toy_engine import TEMPLATE, byte_tokenizer

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
PIECES = st.lists(
    st.binary(max_size=12)
    | st.sampled_from([b"data: ", b"data:", b"\n", b"\r", b"\r\n", b"\n\n", b": x", b"id: 1", b"\xff"]),
    max_size=30,
)


@settings(**examples(300))  # type: ignore[arg-type]
@given(PIECES, st.lists(st.integers(1, 9), max_size=20))
def test_events_do_not_depend_on_how_bytes_are_cut(pieces: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(pieces)
    whole = SseParser().feed(stream)
    parser, cut, rest = SseParser(), [], stream
    for size in sizes:
        cut += parser.feed(rest[:size])
        rest = rest[size:]
    assert cut + parser.feed(rest) == whole


@settings(**examples(200))  # type: ignore[arg-type]
@given(st.dictionaries(st.text(max_size=8), st.text() | st.integers() | st.none(), max_size=5))
def test_a_frame_comes_back_as_it_was(content: dict[str, object]) -> None:
    (data,) = SseParser().feed(frame(content))
    assert json.loads(data) == content


@settings(**examples(300))  # type: ignore[arg-type]
@given(
    st.sampled_from([HandshakeRequest, HandshakeReply, VerifyRequest, VerifyReply, ContinueRequest]),
    st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()),
)
def test_a_message_is_read_whole_or_refused(message: type[Message], content: bytes) -> None:
    try:
        read = message.model_validate_json(content)
    except ValidationError:
        return
    assert message.model_validate_json(read.encode()) == read


@settings(**examples(300))  # type: ignore[arg-type]
@given(st.text() | JSON.map(json.dumps) | st.sampled_from(['{"error"', '{"finish"', '{"error": 3}', '{"finish": "x"}']))
def test_a_frame_of_the_cloud_is_read_or_refused(data: str) -> None:
    with contextlib.suppress(CloudError):
        _parse_frame(data.encode(errors="replace").decode())
    assert isinstance(_error_message(data.encode(errors="replace")), str)


@settings(**examples(300))  # type: ignore[arg-type]
@given(
    st.lists(
        st.text(max_size=6) | st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {', "}"])
    )
)
def test_any_text_is_read_for_calls(pieces: list[str]) -> None:
    reader = CallReader()
    for piece in pieces:
        reader.feed(piece)
    reader.finish()


@settings(**examples(200))  # type: ignore[arg-type]
@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.text() | st.none()},
            optional={"tool_calls": st.lists(JSON.filter(lambda value: isinstance(value, dict)), max_size=2)},
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_messages_are_encoded_or_refused(messages: list[dict[str, object]]) -> None:
    tokenizer = byte_tokenizer()
    try:
        ids = ChatTemplate(TEMPLATE, None, None).encode(tokenizer, messages)
    except BadRequestError:
        return
    assert sum(token in tokenizer.special_ids for token in ids) == 2 * len(messages) + 1


@pytest.mark.parametrize("path", ["handshake", "verify"])
@settings(**examples(40))  # type: ignore[arg-type]
@given(reply=st.binary(max_size=200), status=st.sampled_from([200, 204, 301, 400, 404, 409, 410, 429, 500, 503, 599]))
def test_a_cloud_that_answers_anything(path: str, reply: bytes, status: int) -> None:
    """Only errors of ours come out of it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(reply)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + reply)
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, cloud_client(f"http://127.0.0.1:{port}") as client:
            call = (
                client.handshake() if path == "handshake" else client.verify(VerifyRequest(session_id="s" * 8, round=1))
            )
            with contextlib.suppress(SouschefError):
                await call

    asyncio.run(scenario())
