"""Have every other gateway process do something, and gather what each of them says to it.

Orders stand in a stream for a day, so that who lost Redis for a while still reads them when it is
back; answers come in a list of the order's own. Only operators' requests wait here.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import structlog
from msgspec import Meta

from prefix_index.replica.link import LINK_ERRORS, answer
from prefix_index.replica.tail import Tail

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from prefix_index.replica.link import Link

    Handler = Callable[[dict[str, Any]], dict[str, Any]]

VERSION: Final = 1
# Others read at once; a second is a busy loop or a server that stands still.
PATIENCE_S: Final = 2.0
# How long one read of the answers waits in the server.
_WAIT_S: Final = 0.25
_RETRY_S: Final = 0.2
# Who was not heard for so long is gone: longer than any pause of a busy process, so that nobody is
# left out of a sum without a word.
PRESENT_S: Final = 30
_BEAT_S: Final = 5.0
# Goodbye is a courtesy: without it others wait for this process a while.
_GOODBYE_S: Final = 0.2
# Orders are an operator's: this many in a day is a script that went wrong.
_MAX_ORDERS: Final = 256
_KEPT_S: Final = 86_400
_ANSWERS_KEPT_S: Final = 60
# A thousand tenants' usage takes 150 KB.
_MAX_BYTES: Final = 4 << 20

log = structlog.get_logger("warmlane")

_Name = Annotated[str, Meta(min_length=1, max_length=64)]


class Order(msgspec.Struct, array_like=True, frozen=True):
    """What one process asks of the others.

    Attributes:
        version: ``VERSION``; others are not read.
        gateway: Id of the process that asks.
        id: Of the order: names the list of its answers.
        kind: Which handler it is for.
        body: What the handler is given.
    """

    version: int
    gateway: _Name
    id: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    kind: _Name
    body: dict[str, Any]


class _Said(msgspec.Struct, array_like=True, frozen=True):
    """One process's answer."""

    gateway: _Name
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answers:
    """What came back.

    Attributes:
        documents: Id of a process -> what it said.
        num_missing: Processes that were there lately and said nothing in time; None = Redis is
            away, so that nobody was asked.
    """

    documents: dict[str, dict[str, Any]]
    num_missing: int | None


_order_decoder = msgspec.msgpack.Decoder(Order)
_said_decoder = msgspec.msgpack.Decoder(_Said)
_encode = msgspec.msgpack.Encoder().encode


class Orders:
    """The orders of one process; one event loop only.

    Args:
        link: Connection to Redis; run by somebody else.
        gateway: This process's id, unlike any other's.

    Attributes:
        gateway: This process's id.
        handlers: Kind -> what does it here; never raises.
    """

    def __init__(self, link: Link, *, gateway: str) -> None:
        self.gateway = gateway
        self.handlers: dict[str, Handler] = {}
        self._link = link
        self._present = link.key("gateways", "present")
        self._stream = link.key("gateways", "orders")
        self._tail = Tail(link, self._stream)

    async def ask(self, kind: str, body: dict[str, Any]) -> Answers:
        """Have all others do something; returns when all have answered, or after ``PATIENCE_S``.

        Args:
            kind: Of their handler.
            body: For it; plain values.
        """
        order = Order(VERSION, self.gateway, secrets.token_hex(8), kind, body)
        expected, documents = set[str](), dict[str, dict[str, Any]]()
        try:
            client = self._link.client
            expected = await self._others()
            await answer(client.xadd(self._stream, {b"o": _encode(order)}, maxlen=_MAX_ORDERS))
            await answer(client.expire(self._stream, _KEPT_S))
            await self._gather(order, expected, documents)
        except LINK_ERRORS as error:
            self._link.report(error)
            return Answers(documents, None)
        return Answers(documents, len(expected - documents.keys()))

    async def run(self) -> None:
        """Do what others ask for, until cancelled; then say goodbye."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._trying(self._follow))
                tasks.create_task(self._trying(self._be_present))
        finally:
            await self._say_goodbye()

    async def _trying(self, part: Callable[[], Awaitable[None]]) -> None:
        while True:
            if self._link.is_up:
                try:
                    await part()
                except LINK_ERRORS as error:
                    self._link.report(error)
            await asyncio.sleep(_RETRY_S)

    async def _follow(self) -> None:
        await self._tail.start()
        while True:
            for _, fields in await self._tail.read():
                await self._obey(fields.get(b"o", b""))

    async def _be_present(self) -> None:
        """Say every few seconds, by the server's clock, that this process is there."""
        while True:
            # Who cannot be asked yet is not waited for.
            if self._tail.is_started:
                client, now_s = self._link.client, await self._now_s()
                await answer(client.zadd(self._present, {self.gateway: now_s}))
                await answer(client.zremrangebyscore(self._present, "-inf", now_s - PRESENT_S))
                await asyncio.sleep(_BEAT_S)
            else:
                await asyncio.sleep(_RETRY_S)

    async def _others(self) -> set[str]:
        """Return the ids of the other processes that were there lately."""
        since_s = await self._now_s() - PRESENT_S
        found: Any = await answer(self._link.client.zrangebyscore(self._present, since_s, "+inf"))
        return {name.decode(errors="replace") for name in found} - {self.gateway}

    async def _now_s(self) -> int:
        now: Any = await answer(self._link.client.time())
        return int(now[0])

    async def _say_goodbye(self) -> None:
        with contextlib.suppress(TimeoutError, *LINK_ERRORS):
            async with asyncio.timeout(_GOODBYE_S):
                await answer(self._link.client.zrem(self._present, self.gateway))

    async def _gather(
        self, order: Order, expected: set[str], documents: dict[str, dict[str, Any]]
    ) -> None:
        key = self._answers(order)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + PATIENCE_S
        while expected - documents.keys() and loop.time() < deadline_s:
            found: Any = await answer(self._link.blocking.blpop([key], timeout=_WAIT_S))
            if found is None:
                continue
            try:
                said = _said_decoder.decode(found[1][:_MAX_BYTES])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                log.warning("order_answer_unreadable", kind=order.kind)
                continue
            documents[said.gateway] = said.document

    async def _obey(self, data: bytes) -> None:
        try:
            order = _order_decoder.decode(data[:_MAX_BYTES])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            log.warning("order_unreadable")
            return
        handler = self.handlers.get(order.kind)
        if order.version != VERSION or order.gateway == self.gateway or handler is None:
            return
        said = _encode(_Said(self.gateway, handler(order.body)))
        key = self._answers(order)
        await answer(self._link.client.rpush(key, said))
        await answer(self._link.client.expire(key, _ANSWERS_KEPT_S))

    def _answers(self, order: Order) -> str:
        return self._link.key("gateways", "answers", order.id)
