"""The link to Redis: up, down, slow, back."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest
from redis.crc import key_slot

from prefix_index.replica.link import LINK_ERRORS, Link, LinkDown, answer
from tests.support import free_port, poll_until
from tests.valkey import Valkey, valkey

__all__ = ["valkey"]


@contextlib.asynccontextmanager
async def running(url: str, *, timeout_s: float = 0.5, tls: bool = False) -> AsyncIterator[Link]:
    link = Link(url, namespace="t", timeout_s=timeout_s, tls=tls, rng=random.Random(1))
    task = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_link_comes_up_and_serves_commands(valkey: Valkey) -> None:
    async with running(valkey.url) as link:
        with pytest.raises(LinkDown):
            _ = link.client
        await poll_until(lambda: link.is_up)
        assert await link.client.set("a", b"1")
        assert link.down_since_s is None


async def test_a_link_over_a_unix_socket_works_alike(valkey: Valkey) -> None:
    async with running(f"unix://{valkey.socket_path}?db=1") as link:
        await poll_until(lambda: link.is_up)
        assert await link.client.get("a") is None


async def test_a_server_that_starts_later_is_found() -> None:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory(prefix="wl-valkey-") as folder:
        server = Valkey(Path(folder))
        async with running(server.url) as link:
            await poll_until(lambda: link.errors.total() >= 2)
            server.start()
            try:
                await poll_until(lambda: link.is_up)
            finally:
                server.stop()


async def test_a_killed_server_is_noticed_and_its_return_is_told(valkey: Valkey) -> None:
    ups: list[int] = []
    reasons: list[str] = []
    async with running(valkey.url) as link:
        link.on_up(lambda: ups.append(1))
        link.on_down(reasons.append)
        await poll_until(lambda: link.is_up)
        valkey.stop()
        await poll_until(lambda: not link.is_up)
        with pytest.raises(LinkDown):
            _ = link.client
        assert link.down_since_s is not None
        valkey.start()
        await poll_until(lambda: link.is_up)
        assert (len(ups), len(reasons), link.num_outages) == (2, 1, 1)


async def test_a_server_that_stands_still_counts_as_away(valkey: Valkey) -> None:
    async with running(valkey.url, timeout_s=0.05) as link:
        await poll_until(lambda: link.is_up)
        valkey.pause()
        try:
            await poll_until(lambda: not link.is_up)
        finally:
            valkey.resume()
        await poll_until(lambda: link.is_up)


async def test_one_error_of_a_caller_is_no_outage(valkey: Valkey) -> None:
    async with running(valkey.url) as link:
        await poll_until(lambda: link.is_up)
        link.report(TimeoutError())
        await link.client.ping()
        await asyncio.sleep(0)
        assert link.is_up
        assert link.errors == {"TimeoutError": 1}


@pytest.mark.parametrize("is_connected", [False, True])
@pytest.mark.parametrize("is_blocking", [False, True])
async def test_a_command_whose_connection_is_dropped_fails_as_any_other(
    valkey: Valkey, is_connected: bool, is_blocking: bool
) -> None:
    """At whatever moment it is, connecting, writing or waiting: no caller knows another error."""
    async with running(valkey.url) as link:
        await poll_until(lambda: link.is_up)
        client = link.blocking if is_blocking else link.client
        failed = 0
        for turns in range(40):
            await client.connection_pool.disconnect()
            if is_connected:
                await client.ping()
            read = client.xread({"s": "0-0"}, block=20) if is_blocking else client.get("a")
            command = asyncio.create_task(answer(read))
            for _ in range(turns):
                await asyncio.sleep(0)
            await client.connection_pool.disconnect()
            try:
                assert not await command
            except LINK_ERRORS:
                failed += 1
        assert failed


async def test_a_cancellation_always_gets_through_and_what_cleans_up_may_still_send(
    valkey: Valkey,
) -> None:
    async with running(valkey.url) as link:
        await poll_until(lambda: link.is_up)

        async def use() -> None:
            try:
                while True:
                    await answer(link.client.ping())
            finally:
                for name in ("a", "b"):
                    await answer(link.client.set(name, b"1"))

        for turns in range(40):
            await link.client.delete("a", "b")
            task = asyncio.create_task(use())
            for _ in range(turns + 1):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(asyncio.shield(task), 10)
            assert await link.client.exists("a", "b") == 2


async def test_nobody_listening_is_a_state_and_not_an_exception() -> None:
    async with running(f"redis://127.0.0.1:{free_port()}") as link:
        await poll_until(lambda: link.errors.total() >= 2)
        assert not link.is_up


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://127.0.0.1",
        "redis+sentinel://",
        "redis+sentinel://host:port/service",
        "redis+sentinel://:secret@host:26379",
        "redis+sentinel://host:26379/service/db",
        "redis://:secret@host:notaport",
    ],
)
def test_a_url_that_cannot_be_understood_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="expected redis://") as refused:
        Link(url, namespace="t")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:secret@host:6379/2",
        "rediss://:secret@host:6379",
        "unix:///run/redis.sock?db=1",
        "redis+sentinel://a:26379/service",
        "redis+sentinel://user:s%40cret@a:26379,b,[::1]:26380/service/3?sentinel_password=x",
    ],
)
def test_urls_of_every_documented_form_are_taken(url: str) -> None:
    assert not Link(url, namespace="t").is_up


@pytest.mark.parametrize("pool", ["chat", "a:b", "{x}", "}{", "%7B", "söme pool"])
@pytest.mark.parametrize("namespace", ["warmlane", "{ns}", ""])
def test_keys_of_one_pool_share_a_cluster_slot_whatever_its_name(pool: str, namespace: str) -> None:
    link = Link("redis://h", namespace=namespace)
    slots = {
        key_slot(link.key(pool, *parts).encode())
        for parts in (("stream",), ("state", "w1"), ("lease", "{w}:2"))
    }
    assert len(slots) == 1
    assert ":v1:{" in link.key(pool, "stream")


def test_pools_of_different_names_never_share_a_key() -> None:
    link = Link("redis://h", namespace="t")
    names = ["a", "a}", "a%7D", "{a", "{a}", "a:b"]
    assert len({link.key(name, "stream") for name in names}) == len(names)
