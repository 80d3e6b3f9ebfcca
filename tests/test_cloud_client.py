"""The edge's way to the cloud: what is retried, what trips the breaker, what is measured, what is refused."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydantic import SecretStr

from edge_agent.circuit_breaker import CircuitBreaker, CircuitState
from edge_agent.cloud_client import CloudClient, CloudTimeouts
from edge_agent.cloud_verifier import CloudGenerator, CloudVerifier
from edge_agent.decision import Mode
from edge_agent.draft_ahead import DraftAhead
from edge_agent.drafters import ModelDrafter
from edge_agent.request import GenerationRequest
from shared.acceptance import Draft
from shared.errors import (
    CloudProtocolError,
    CloudRejectedError,
    CloudSessionLostError,
    CloudUnavailableError,
    ConfigError,
    TokenizerMismatchError,
)
from shared.inference_thread import InferenceThread
from shared.protocol import Opening, VerifyRequest
from shared.sampling import Sampler, SamplingParams
from tests.cloud_edge import PROMPT, PlannedController, always, cloud_client, expected, rounds_of
from tests.cloud_toy import FINGERPRINT, SEED, VOCAB, TableDecoder, running_cloud
from tests.fakes import TableLM
from tests.tcp_proxy import TcpProxy

REQUEST = GenerationRequest(PROMPT, 40, SamplingParams(temperature=0))
ROUND = VerifyRequest(session_id="session-0001", round=0, opening=Opening(tokens=PROMPT, prompt_len=5))
GOOD = b'{"round":0,"accepted":0,"next_token":3,"timing_ms":1.0,"load":{"gamma_hint":4}}'


class FakeCloud:
    """Answers every request with the next of its scripted replies (the last one again and again)."""

    def __init__(self, *replies: bytes, hold_s: float = 0.0) -> None:
        self.replies = list(replies)
        self.hold_s = hold_s
        self.heads: list[str] = []
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head.decode())
                length = next(
                    (int(x[15:]) for x in head.decode().lower().split("\r\n") if x.startswith("content-l")), 0
                )
                await reader.readexactly(length)
                await asyncio.sleep(self.hold_s)
                reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
                if not reply:
                    return
                writer.write(reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            writer.close()


def http(content: bytes, status: str = "200 OK", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(content)}\r\n{extra}\r\n".encode() + content


@asynccontextmanager
async def fake_cloud(
    *replies: bytes, hold_s: float = 0.0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[FakeCloud]:
    cloud = FakeCloud(*replies, hold_s=hold_s)
    server = await asyncio.start_server(cloud.handle, "127.0.0.1", 0, ssl=tls)
    cloud.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield cloud
    finally:
        server.close()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  (what is waited for is in the product, which has no event for it)
            await asyncio.sleep(0.01)


def test_a_wrong_tokenizer_is_refused_and_the_cloud_stays_off() -> None:
    async def scenario(url: str) -> None:
        client = CloudClient(url, "another", VOCAB)
        with pytest.raises(TokenizerMismatchError, match="tokenizers differ"):
            await client.handshake()
        assert not client.link_state.usable
        await client.close()
        async with cloud_client(url) as client:
            assert not client.link_state.usable
            await client.handshake()
            assert client.link_state.usable
            assert len(client.link_state.verify_cost_s) == 9

    with running_cloud() as cloud:
        asyncio.run(scenario(cloud.url))


def test_the_background_probe_finds_the_cloud_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with fake_cloud(b"") as cloud, cloud_client(cloud.url) as client:
            probing = asyncio.create_task(client.run(0.01, 0.01))
            await _until(lambda: bool(cloud.heads))
            assert not client.link_state.usable
            client._breaker = CircuitBreaker(rest_s=0.01)
            cloud.replies = [http(b'{"model":"m","context":9,"verify_cost_ms":[1.0],"max_gamma":8}')]
            await _until(lambda: client.link_state.usable)
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    asyncio.run(scenario())
    assert len([record for record in caplog.records if "cloud verifier" in record.getMessage()]) <= 3


@pytest.mark.parametrize(
    ("reply", "error", "num_requests"),
    [
        (http(b"{}", "500 Oops"), CloudUnavailableError, 1),
        (http(b"{}", "503 Busy"), CloudUnavailableError, 1),
        (http(b"{}", "429 Slow"), CloudUnavailableError, 1),
        (http(b'{"error":{"message":"no"}}', "400 Bad"), CloudRejectedError, 1),
        (http(b"<html>", "404 What"), CloudRejectedError, 1),
        (http(b"{}", "410 Gone"), CloudSessionLostError, 1),
        (http(b"", "307 Elsewhere", "location: http://127.0.0.1:1/\r\n"), CloudRejectedError, 1),
        (http(b"not json"), CloudProtocolError, 1),
        (http(GOOD.replace(b'"accepted":0', b'"accepted":-1')), CloudProtocolError, 1),
        (http(GOOD.replace(b'"round":0', b'"round":7')), CloudProtocolError, 1),
        (http(b"x" * 2_000_000), CloudProtocolError, 1),
        (b"garbage\r\n\r\n", CloudUnavailableError, 2),
        (b"", CloudUnavailableError, 2),
    ],
)
def test_what_comes_of_each_kind_of_reply(reply: bytes, error: type[Exception], num_requests: int) -> None:
    async def scenario() -> None:
        async with fake_cloud(reply) as cloud, cloud_client(cloud.url) as client:
            with pytest.raises(error):
                await client.verify(ROUND)
            assert len(cloud.heads) == num_requests

    asyncio.run(scenario())


def test_a_broken_connection_is_tried_again() -> None:
    async def scenario() -> None:
        async with fake_cloud(b"", http(GOOD)) as cloud, cloud_client(cloud.url) as client:
            assert (await client.verify(ROUND)).next_token == 3
            assert client.link_state.gamma_hint == 4
            assert client.circuit_state is CircuitState.CLOSED

    asyncio.run(scenario())


def test_a_slow_reply_is_given_up_and_not_asked_for_again() -> None:
    async def scenario() -> None:
        timeouts = CloudTimeouts(connect_s=1, read_s=0.1, per_token_s=0.0)
        async with fake_cloud(http(GOOD), hold_s=60) as cloud, cloud_client(cloud.url, timeouts=timeouts) as client:
            with pytest.raises(CloudUnavailableError):
                await client.verify(ROUND)
            assert len(cloud.heads) == 1

    asyncio.run(scenario())


def test_cancelled_calls_and_refusals_leave_the_breaker_closed() -> None:
    async def scenario() -> None:
        async with fake_cloud(http(GOOD), hold_s=60) as cloud, cloud_client(cloud.url) as client:
            for _ in range(20):
                task = asyncio.create_task(client.verify(ROUND))
                await asyncio.sleep(0.005)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            assert client.circuit_state is CircuitState.CLOSED
        async with fake_cloud(http(b"{}", "400 Bad")) as cloud, cloud_client(cloud.url) as client:
            for _ in range(20):
                with pytest.raises(CloudRejectedError):
                    await client.verify(ROUND)
            assert client.circuit_state is CircuitState.CLOSED
            assert len(cloud.heads) == 20

    asyncio.run(scenario())


def test_failures_open_the_breaker_and_nothing_is_sent_until_it_has_rested() -> None:
    async def scenario() -> None:
        now = 0.0
        breaker = CircuitBreaker(threshold=3, rest_s=10.0, clock=lambda: now)
        async with fake_cloud(http(b"{}", "500 Oops")) as cloud, cloud_client(cloud.url, breaker=breaker) as client:
            for _ in range(10):
                with pytest.raises(CloudUnavailableError):
                    await client.verify(ROUND)
            assert len(cloud.heads) == 3
            assert client.circuit_state is CircuitState.OPEN
            now = 11.0
            assert client.circuit_state is CircuitState.HALF_OPEN
            cloud.hold_s = 0.05
            calls = [client.verify(ROUND) for _ in range(5)]
            assert all(
                isinstance(e, CloudUnavailableError) for e in await asyncio.gather(*calls, return_exceptions=True)
            )
            assert len(cloud.heads) == 4  # One probe, and it failed.
            now = 22.0
            cloud.replies = [http(GOOD)]
            await client.verify(ROUND)
            assert client.circuit_state is CircuitState.CLOSED

    asyncio.run(scenario())


def test_a_cancelled_probe_makes_way_for_the_next() -> None:
    now = 0.0
    breaker = CircuitBreaker(threshold=1, rest_s=1.0, clock=lambda: now)
    with pytest.raises(CloudUnavailableError), breaker.call():
        raise CloudUnavailableError("down")
    now = 2.0
    with pytest.raises(asyncio.CancelledError), breaker.call():
        raise asyncio.CancelledError
    assert breaker.state is CircuitState.HALF_OPEN
    with breaker.call():
        pass
    assert breaker.state is CircuitState.CLOSED


def test_no_header_that_says_nothing_and_the_bytes_are_counted() -> None:
    async def scenario(port: int) -> None:
        proxy = TcpProxy(port)
        async with proxy.running() as proxied, cloud_client(f"http://127.0.0.1:{proxied}") as client:
            await rounds_of(client, REQUEST, PlannedController(always(Mode.CLOUD_VERIFY)))
            await asyncio.gather(*client._background)
            counted = client.traffic.sent + client.traffic.received
            assert abs(counted - proxy.bytes_passed) < 0.02 * proxy.bytes_passed
            assert client.link_state.rtt_s is not None

    async def heads() -> None:
        async with fake_cloud(http(GOOD)) as cloud, cloud_client(cloud.url, api_key=SecretStr("k")) as client:
            await client.verify(ROUND)
            names = [line.partition(":")[0].lower() for line in cloud.heads[0].split("\r\n")[1:] if line]
            assert sorted(names) == ["authorization", "content-length", "host", "x-session"]

    asyncio.run(heads())
    with running_cloud() as cloud:
        asyncio.run(scenario(int(cloud.url.rsplit(":", 1)[1])))


@pytest.mark.parametrize("url", ["ftp://a", "localhost:80", "http://", "file:///etc/passwd"])
def test_what_is_no_address_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError):
        CloudClient(url, FINGERPRINT, VOCAB)


def test_tls_is_verified_and_an_own_ca_can_be_named(tmp_path: Path) -> None:
    certificate = _self_signed(tmp_path)
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_tls.load_cert_chain(certificate, tmp_path / "key.pem")

    async def scenario() -> None:
        async with fake_cloud(http(GOOD), tls=server_tls) as cloud:
            async with cloud_client(cloud.url) as client:
                with pytest.raises(CloudUnavailableError):
                    await client.verify(ROUND)
                assert not cloud.heads
            async with cloud_client(cloud.url, ca_file=certificate) as client:
                assert (await client.verify(ROUND)).next_token == 3

    asyncio.run(scenario())
    with pytest.raises(ConfigError):
        CloudClient("https://a", FINGERPRINT, VOCAB, ca_file=tmp_path / "missing.pem")


def test_accepting_more_than_was_drafted_is_no_verdict() -> None:
    reply = b'{"round":1,"accepted":2,"next_token":3,"timing_ms":1.0,"load":{"gamma_hint":4}}'

    async def scenario() -> None:
        async with fake_cloud(http(reply)) as cloud, cloud_client(cloud.url) as client:
            verifier = CloudVerifier(client, REQUEST)
            with pytest.raises(CloudProtocolError, match="2 of 1"):
                await verifier.verify(PROMPT, Draft((1,)), Sampler(REQUEST.sampling))
            await verifier.release(PROMPT)

    asyncio.run(scenario())


@pytest.mark.parametrize("breaks", ["\u2028", "\u0085", "\x1c"])
def test_odd_line_separators_do_not_cut_a_frame(breaks: str) -> None:
    """A raw U+2028 in a comment before and inside of an ignored field; the token after it still arrives."""
    text = f': x{breaks}y\ndata: {{"position":5,"token":7}}\nevent: a{breaks}data: z\n\n'
    body = text.encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(body)

    async def scenario() -> None:
        async with fake_cloud(head + body) as cloud, cloud_client(cloud.url) as client:
            generator = CloudGenerator(client, REQUEST)
            verdict = await generator.verify(PROMPT, Draft(), Sampler(REQUEST.sampling))
            assert verdict.next_token == 7
            await generator.release(PROMPT)

    asyncio.run(scenario())


@pytest.mark.parametrize("blend", [0.0, 0.3, 1.0])
def test_drafting_ahead_changes_nothing_but_the_wait(blend: float) -> None:
    thread = InferenceThread()

    async def scenario(url: str) -> DraftAhead:
        drafter = DraftAhead(ModelDrafter(TableLM(VOCAB, 9, tied_to=TableLM(VOCAB, SEED), blend=blend), thread))
        async with cloud_client(url) as client:
            verifier = CloudVerifier(client, REQUEST, drafter)
            sampler, tokens = Sampler(REQUEST.sampling), list(PROMPT)
            while len(tokens) < 45:
                draft = await drafter.propose(tokens, min(3, 44 - len(tokens)), sampler)
                verdict = await verifier.verify(tokens, draft, sampler)
                for token in verdict.tokens(draft):
                    tokens.append(token)
                    sampler.append(token)
            assert tokens[5:] == expected(REQUEST)
            drafter.close()
            await verifier.release(tokens)
        return drafter

    try:
        with running_cloud() as cloud:
            drafter = asyncio.run(scenario(cloud.url))
    finally:
        thread.stop()
    assert drafter.num_started > 5
    assert drafter.num_kept >= drafter.num_started - 1 if blend == 0.0 else drafter.num_kept < drafter.num_started


def test_log_probabilities_come_with_both_modes() -> None:
    request = GenerationRequest(PROMPT, 12, SamplingParams(temperature=0), num_top_logprobs=2)

    async def scenario(url: str) -> list[list[object]]:
        async with cloud_client(url) as client:
            modes = (Mode.LOCAL_DIRECT, Mode.CLOUD_VERIFY, Mode.CLOUD_GENERATE)
            answers = [await rounds_of(client, request, PlannedController(always(mode))) for mode in modes]
        return [[event.logprobs for round in rounds for event in round.tokens] for rounds in answers]

    with running_cloud() as cloud:
        local, verified, generated = asyncio.run(scenario(cloud.url))
    assert local == verified == generated
    assert all(logprobs is not None for logprobs in local)


def test_a_cancelled_answer_says_good_bye() -> None:
    async def scenario(url: str, count: Callable[[], int]) -> None:
        async with cloud_client(url) as client:
            for mode in (Mode.CLOUD_VERIFY, Mode.CLOUD_GENERATE):
                for pause in (0.0, 0.01, 0.05):
                    answer = asyncio.create_task(rounds_of(client, REQUEST, PlannedController(always(mode))))
                    await asyncio.sleep(pause)
                    answer.cancel()
                    await asyncio.gather(answer, return_exceptions=True)
            await _until(lambda: count() == 0)

    with running_cloud(TableDecoder(pass_s=0.005)) as cloud:
        asyncio.run(scenario(cloud.url, lambda: len(cloud.service.sessions)))


def _self_signed(directory: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (directory / "key.pem").write_bytes(private)
    (directory / "certificate.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return directory / "certificate.pem"
