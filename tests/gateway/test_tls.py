"""TLS towards clients and towards workers: verified, reloaded, never given up for plain text."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from gateway.proxy.limits import Limits
from gateway.routing.pool import Pool
from gateway.serve import Gateway as Assembled
from gateway.settings import ConfigError, load
from gateway.tls import ServerTls, TlsError, worker_context
from gateway.upstream.client import ConnectFailed, Upstream
from tests.fakes.engine import DONE, FINISH, ROLE, RawEngine, content, openai_engine, stream
from tests.fakes.gateway import RawClient, chat, gateway, wire, worker
from tests.support import poll_until

BODY = json.dumps(chat()).encode()
Issue = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(ca: trustme.CA, tmp_path: Path) -> str:
    path = tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(path)
    return str(path)


@pytest.fixture
def issue(ca: trustme.CA, tmp_path: Path) -> Issue:
    """Write a certificate and its key for names; the same two files each time."""

    def write(*names: str, by: trustme.CA = ca) -> tuple[str, str]:
        cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
        issued = by.issue_cert(*(names or ("127.0.0.1", "localhost")))
        cert.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        return str(cert), str(key)

    return write


@pytest.fixture
def trusting(ca_file: str) -> ssl.SSLContext:
    """What a client, or the gateway, verifies its peer with."""
    return worker_context(ca_file)


def engine_tls(issue: Issue, *names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*issue(*names))
    return context


async def answer(client: RawClient) -> tuple[int, bytes]:
    async with asyncio.timeout(20):
        status, headers = await client.head()
        return status, await client.reader.readexactly(int(headers["content-length"]))


def names_of(client: RawClient) -> set[str]:
    """The names in the certificate that the gateway showed."""
    cert = client.writer.get_extra_info("peercert")
    return {value for _, value in cert["subjectAltName"]}


async def test_a_connection_is_served_and_may_be_handed_over(
    issue: Issue, trusting: ssl.SSLContext
) -> None:
    tls = ServerTls(*issue())
    async with openai_engine() as engine, gateway(engine.url, ssl=tls.context) as gw:
        client = await RawClient.connect(gw.port, ssl=trusting)
        for data in (wire(BODY), b"GET /v1/models HTTP/1.1\r\nhost: gw\r\n\r\n", wire(BODY)):
            await client.send(data)
            assert (await answer(client))[0] == 200
        await client.close()

    assert len(engine.seen) == 2


async def test_a_stream_of_many_megabytes_passes(issue: Issue, trusting: ssl.SSLContext) -> None:
    piece = content("x" * 100_000)
    sent = [ROLE, *[piece] * 50, FINISH, DONE]
    async with (
        RawEngine(lambda _: stream(*sent), ssl=engine_tls(issue)) as engine,
        gateway(
            pools=[Pool("chat", models=["m"], workers=[worker("w0", engine.url, ssl=trusting)])],
            ssl=ServerTls(*issue()).context,
        ) as gw,
    ):
        client = await RawClient.connect(gw.port, ssl=trusting)
        lines = ["POST /v1/chat/completions HTTP/1.0", f"content-length: {len(BODY)}", "", ""]
        await client.send("\r\n".join(lines).encode() + BODY)
        async with asyncio.timeout(20):
            await client.head()
            assert await client.rest() == b"".join(sent)
        await client.close()


async def test_new_connections_get_a_new_certificate_and_old_ones_go_on(
    issue: Issue, trusting: ssl.SSLContext
) -> None:
    tls = ServerTls(*issue("127.0.0.1", "old.example"))
    reloading = asyncio.create_task(tls.run(0.01))
    async with openai_engine() as engine, gateway(engine.url, ssl=tls.context) as gw:
        # With a name and without one: clients that go by address name nobody.
        old = await RawClient.connect(gw.port, ssl=trusting, server_hostname="old.example")
        issue("127.0.0.1", "new.example")
        seen = set[str]()
        while "new.example" not in seen:
            probe = await RawClient.connect(gw.port, ssl=trusting)
            seen = names_of(probe)
            await probe.send(wire(BODY))
            assert (await answer(probe))[0] == 200
            await probe.close()
        named = await RawClient.connect(gw.port, ssl=trusting, server_hostname="new.example")
        for client in (old, named):
            await client.send(wire(BODY))
            assert (await answer(client))[0] == 200
            await client.close()
    reloading.cancel()
    await asyncio.gather(reloading, return_exceptions=True)


def damage(issue: Issue, folder: Path, how: str) -> None:
    cert, key = folder / "cert.pem", folder / "key.pem"
    match how:
        case "half written":
            cert.write_bytes(cert.read_bytes()[:300])
        case "gone":
            key.unlink()
        case _:
            kept = key.read_bytes()
            issue()
            key.write_bytes(kept)


@pytest.mark.parametrize("how", ["half written", "gone", "of another key"])
async def test_a_certificate_that_cannot_be_used_is_not_taken_up(
    issue: Issue, trusting: ssl.SSLContext, how: str, tmp_path: Path
) -> None:
    tls = ServerTls(*issue())
    damage(issue, tmp_path, how)
    tls.reload()
    async with openai_engine() as engine, gateway(engine.url, ssl=tls.context) as gw:
        client = await RawClient.connect(gw.port, ssl=trusting)
        await client.send(wire(BODY))
        assert (await answer(client))[0] == 200
        await client.close()
        issue("127.0.0.1", "repaired.example")
        tls.reload()
        client = await RawClient.connect(gw.port, ssl=trusting)
        assert "repaired.example" in names_of(client)
        await client.close()


async def test_plain_text_on_the_tls_port_is_not_answered_as_a_request(issue: Issue) -> None:
    async with (
        openai_engine() as engine,
        gateway(engine.url, ssl=ServerTls(*issue()).context) as gw,
    ):
        client = await RawClient.connect(gw.port)
        await client.send(wire(BODY))
        async with asyncio.timeout(20):
            assert b"HTTP/1.1 200" not in await client.reader.read()
        await client.close()

    assert engine.seen == []


async def test_a_greeting_that_does_not_come_ends_the_connection(issue: Issue) -> None:
    limits = Limits(head_s=0.1)
    tls = ServerTls(*issue())
    async with openai_engine() as engine, gateway(engine.url, ssl=tls.context, limits=limits) as gw:
        client = await RawClient.connect(gw.port)
        async with asyncio.timeout(20):
            assert await client.reader.read() == b""
        await client.close()


async def test_an_https_worker_is_asked_when_its_certificate_is_trusted(
    issue: Issue, trusting: ssl.SSLContext
) -> None:
    async with openai_engine(ssl=engine_tls(issue)) as engine:
        pool = Pool("chat", models=["m"], workers=[worker("w0", engine.url, ssl=trusting)])
        async with gateway(pools=[pool]) as gw:
            for is_stream in (True, False):
                assert (await gw.post(body=chat(stream=is_stream)))[0] == 200

    assert engine.url.startswith("https:")
    assert engine.num_connections == 1


@pytest.mark.parametrize("how", ["unknown authority", "other name", "plain text"])
async def test_an_https_worker_that_proves_nothing_gets_no_request(
    issue: Issue, trusting: ssl.SSLContext, how: str
) -> None:
    served: ssl.SSLContext | None = engine_tls(issue, "elsewhere.example")
    if how == "plain text":
        served = None
    async with openai_engine(ssl=served) as engine:
        context = trusting if how != "unknown authority" else None
        url = f"https://127.0.0.1:{engine.port}"
        upstream = Upstream(url, ssl=context, connect_timeout_s=0.5)
        with pytest.raises(ConnectFailed):
            await upstream.request("POST", "/", b"", b"secret")
        w0 = worker("w0", url, ssl=context, connect_timeout_s=0.5)
        pool = Pool("chat", models=["m"], workers=[w0])
        async with gateway(pools=[pool]) as gw:
            assert (await gw.post())[0] == 502
        await poll_until(lambda: upstream.num_connections == 0)

    assert engine.seen == []


async def test_a_configured_gateway_speaks_tls_on_both_sides(
    issue: Issue, ca_file: str, trusting: ssl.SSLContext
) -> None:
    async with openai_engine(ssl=engine_tls(issue)) as engine:
        cert, key = issue()
        pool = {
            "name": "chat",
            "models": ["m"],
            "engine": "openai",
            "worker_ca": ca_file,
            "workers": [{"id": "w0", "url": engine.url}],
        }
        flags = {
            ("pools",): [pool],
            ("server",): {"port": 0, "host": "127.0.0.1", "tls": {"cert": cert, "key": key}},
        }
        settings, _ = load(None, flags=flags, environ={})
        assembled = Assembled(settings)
        ready = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(assembled.run(ready=ready.set_result))
        client = await RawClient.connect(await ready, ssl=trusting)
        await client.send(wire(BODY))
        assert (await answer(client))[0] == 200
        await client.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_files_that_are_no_certificates_are_named(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("nothing")
    pool = {"name": "chat", "models": ["m"], "workers": [{"id": "w", "url": "https://127.0.0.1:9"}]}
    for missing in ("c.pem", "gone.pem"):
        path = str(tmp_path / missing)
        for server, more in (({"tls": {"cert": path, "key": path}}, {}), ({}, {"worker_ca": path})):
            flags = {("pools",): [pool | more], ("server",): server}
            settings, _ = load(None, flags=flags, environ={})
            with pytest.raises(ConfigError, match=missing):
                Assembled(settings)
        with pytest.raises(TlsError, match=missing):
            worker_context(path)


def test_a_certificate_without_its_key_is_refused() -> None:
    flags = {("pools",): [{"name": "c", "models": ["m"]}], ("server",): {"tls": {"cert": "c"}}}
    with pytest.raises(ConfigError, match="belong together"):
        load(None, flags=flags, environ={})
