"""Tool orders and anchors that gateways share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.sharing.anchors import SharedAnchors
from gateway.fleet.sharing.orders import SharedFirstSeen, reordered
from prefix_index.anchors import text_chain
from prefix_index.blocks import root_hash
from prefix_index.canonical.tools import identify
from prefix_index.replica.link import Link
from tests.support import poll_until
from tests.valkey import Valkey, valkey

__all__ = ["valkey"]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def form(*names: str, spaces: str = " ") -> bytes:
    return json.dumps([tool(name) for name in names], separators=(f",{spaces}", ":")).encode()


def set_id(data: bytes) -> bytes:
    found = identify(data)
    assert found is not None
    return found.id


@contextlib.asynccontextmanager
async def running(*parts: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_tool_set_gets_the_order_that_another_gateway_saw_first(valkey: Valkey) -> None:
    links = [Link(valkey.url, namespace="t", timeout_s=1.0) for _ in range(2)]
    one, two = (SharedFirstSeen(time.monotonic, link) for link in links)
    ours, theirs = form("a", "b", "c"), form("c", "a", "b")
    identity = set_id(ours)
    async with running(*(link.run() for link in links), one.map.run(), two.map.run()):
        assert one.keep("tenant", identity, ours) == ours
        await poll_until(lambda: bool(two._orders))
        assert two.keep("tenant", identity, theirs) == ours
        assert two.keep("other tenant", identity, theirs) == theirs


async def test_two_first_orders_become_the_one_that_redis_had_first(valkey: Valkey) -> None:
    links = [Link(valkey.url, namespace="t", timeout_s=1.0) for _ in range(2)]
    one, two = (SharedFirstSeen(time.monotonic, link) for link in links)
    ours, theirs = form("a", "b", "c"), form("c", "a", "b", spaces="")
    identity = set_id(ours)
    one.keep("tenant", identity, ours)
    two.keep("tenant", identity, theirs)
    async with running(links[0].run(), one.map.run()):
        await poll_until(lambda: not one.map.num_waiting)
        async with running(links[1].run(), two.map.run()):
            expected = form("a", "b", "c", spaces="")
            await poll_until(lambda: two.get("tenant", identity) == expected)
            assert one.get("tenant", identity) == ours
    with valkey.client() as client:
        dumps = b"".join(client.dump(key) or b"" for key in client.keys("*"))
    assert b"function" not in dumps
    assert b"tenant" not in dumps


async def test_shared_orders_that_are_none_are_counted(valkey: Valkey) -> None:
    link = Link(valkey.url, namespace="t", timeout_s=1.0)
    one = SharedFirstSeen(time.monotonic, link)
    with valkey.client() as client:
        client.hset(link.key("tool-orders", "map"), b"short", b"x")
        client.hset(link.key("tool-orders", "map"), bytes(16), b"x")
    async with running(link.run(), one.map.run()):
        await poll_until(lambda: one.decode_errors == 2)
        data = form("a", "b")
        assert one.keep("tenant", set_id(data), data) == data


@given(
    st.lists(st.text(max_size=5), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    st.sampled_from(["", " ", "\n  "]),
)
def test_another_order_has_the_same_tools_byte_by_byte(
    names: list[str], rng: Any, spaces: str
) -> None:
    data = form(*names, spaces=spaces)
    tools = identify(data)
    assert tools is not None
    order = list(tools.order)
    rng.shuffle(order)
    other = reordered(data, b"".join(order))
    assert other is not None
    found = identify(other)
    assert found is not None
    assert (list(found.order), found.id, len(other)) == (order, tools.id, len(data))


def test_an_order_of_other_tools_changes_nothing() -> None:
    other = identify(form("a", "x"))
    assert other is not None
    assert reordered(form("a", "b"), b"".join(other.order)) is None


async def test_text_that_another_gateway_read_is_recognised_here(valkey: Valkey) -> None:
    links = [Link(valkey.url, namespace="t", timeout_s=1.0) for _ in range(2)]
    one, two = (SharedAnchors(link, "chat", 1 << 20) for link in links)
    text = b"".join(b"%06d" % number for number in range(1000))
    chain = text_chain(text, root_hash("m"))
    hashes = [bytes([number]) * 16 for number in range(40)]
    async with running(*(link.run() for link in links), one.run(), two.run()):
        await asyncio.to_thread(one.add, chain, hashes, [(len(text), 40 * 16)], 16)
        await poll_until(lambda: bool(two.find(chain)[1]))
        assert two.find(chain) == one.find(chain)
    with valkey.client() as client:
        dumps = b"".join(client.dump(key) or b"" for key in client.keys("*"))
    assert b"000123" not in dumps


async def test_shared_anchors_that_are_none_are_counted(valkey: Valkey) -> None:
    link = Link(valkey.url, namespace="t", timeout_s=1.0)
    one = SharedAnchors(link, "chat", 1 << 20)
    with valkey.client() as client:
        for number, value in enumerate((b"", b"\xc1", b"\x91\x92\xa1a\xa1b", b"\x80")):
            client.hset(link.key("chat/anchors", "map"), b"%d" % number, value)
    async with running(link.run(), one.run()):
        await poll_until(lambda: one.decode_errors == 4)
