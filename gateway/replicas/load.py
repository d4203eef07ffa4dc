"""Tell the other gateways what is in flight here, and hear what is in flight there.

Every gateway says what it has on each worker at most every ``BEAT_S`` while that changes, and now
and then while it does not, so that silence means something. Nothing on a request's path waits for
it: routing reads what was heard last (``gateway/routing/others.py``). A report says what changed,
and twice a second everything, so that a lost one is made good.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING

import structlog
import xxhash

from gateway.replicas.leads import SharedPending
from gateway.replicas.messages import (
    VERSION,
    BadMessage,
    LoadRow,
    Report,
    decode,
    encode,
    micros,
)
from gateway.routing.others import GONE_S, HEARTBEAT_S, OthersLoad
from prefix_index.replica.link import LINK_ERRORS, answer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.routing.pool import Pool
    from prefix_index.replica.link import Link

# Load shared every 50 ms costs 4 to 6 % of one gateway's TTFT, every 500 ms 1.6 to 2.8 times it
# (routing simulation, 4 and 16 gateways).
BEAT_S = 0.05
# While anything is in flight, silence is told from nothing new after two beats.
BUSY_HEARTBEAT_S = 2 * BEAT_S
# A cold prompt is worth telling at once: its siblings come within milliseconds. Bounds the rate.
LEAD_GAP_S = 0.005
# Silence of ``GONE_S`` is noticed within this; ages are read off the clock and need no look.
LOOK_S = 0.25
# How long a listener waits in one go; it only bounds how late it notices the end.
LISTEN_S = 1.0
# A worker's last first token is told this long after its last request: its other gateways hear of
# it in time, and an idle fleet's reports become empty.
PROGRESS_S = 2.0
# Before listening is tried again; the link itself backs off.
RETRY_S = 0.1
# Goodbye is a courtesy: the others notice the silence as well.
GOODBYE_S = 0.2
# Gateways in front of one pool that are listened to. More is somebody making up ids.
MAX_GATEWAYS = 256

log = structlog.get_logger("warmlane")


State = tuple[int, int, float, int, float, float]
_NOTHING: State = (0, 0, 0.0, 0, 0.0, 0.0)


class Channel:
    """One pool's part of the exchange; used by ``LoadExchange`` only.

    Attributes:
        name: Of the channel.
        pool: Name of the pool.
        others: What the other gateways have in flight there.
    """

    def __init__(self, pool: Pool, name: str, gateway: str, on_lead: Callable[[], None]) -> None:
        self.name = name
        self.others = OthersLoad()
        self.others.is_connected = False
        self.pool = pool.name
        self._pool = pool
        self._gateway = gateway
        self._leads, self._texts = SharedPending(on_lead), SharedPending(on_lead)
        pool.others = self.others
        pool.pending, pool.pending_texts = self._leads, self._texts
        # Worker -> what was said of it last, as the books have it.
        self._sent: dict[str, State] = {}
        self._sent_changes = (0, 0)
        self._sent_s = self._full_sent_s = float("-inf")
        self._is_busy = False

    def due(self, now_s: float) -> bytes | None:
        """Return what must be said now, if anything, and take it as said."""
        is_full = now_s - self._full_sent_s >= HEARTBEAT_S - BEAT_S / 2
        rows = self._rows(now_s, is_full=is_full)
        changes = (self._leads.num_changes, self._texts.num_changes)
        tells_leads = is_full or changes != self._sent_changes
        # A beat early: the next look at the clock may come when patience has ended.
        is_silent = self._is_busy and now_s - self._sent_s >= BUSY_HEARTBEAT_S - BEAT_S / 2
        if not (rows or tells_leads or is_silent):
            return None
        self._sent_s, self._sent_changes = now_s, changes
        if is_full:
            self._full_sent_s = now_s
        report = Report(
            VERSION,
            self._gateway,
            tuple(rows),
            is_full,
            self._leads.announced() if tells_leads else None,
            self._texts.announced() if tells_leads else None,
        )
        return encode(report)

    def repeat(self) -> None:
        """Say everything next time: what was said last may not have arrived."""
        self._full_sent_s = float("-inf")

    def goodbye(self) -> bytes:
        """Return the last thing said."""
        return encode(Report(VERSION, self._gateway, is_leaving=True))

    def heard(self, report: Report, now_s: float) -> None:
        """Take over what another gateway said.

        Raises:
            BadMessage: If there are too many gateways already.
        """
        gateway, workers = report.gateway, self._pool.workers
        if report.is_leaving:
            self._drop(gateway)
            return
        if len(self.others) >= MAX_GATEWAYS and not self.others.knows(gateway):
            raise BadMessage(f"expected at most {MAX_GATEWAYS} gateways")
        if report.loads is not None:
            loads = {r.worker: r.translate(now_s) for r in report.loads if r.worker in workers}
            self.others.report(gateway, loads, now_s, is_full=report.is_full)
        if report.leads is not None:
            self._leads.told(gateway, report.leads, workers)
        if report.texts is not None:
            self._texts.told(gateway, report.texts, workers)

    def look(self, now_s: float, *, is_connected: bool) -> None:
        """Drop who is silent; called a few times a second."""
        self.others.is_connected = is_connected
        for gateway in self.others.expire(now_s):
            log.info("gateway_gone", gateway=gateway, pool=self._pool.name)
            self._drop(gateway)

    def _drop(self, gateway: str) -> None:
        self.others.leave(gateway)
        self._leads.told(gateway, (), ())
        self._texts.told(gateway, (), ())

    def _rows(self, now_s: float, *, is_full: bool) -> list[LoadRow]:
        """Return the workers of which there is something new to say; of all that count, if full."""
        rows = []
        sent = self._sent
        if is_full:
            sent.clear()  # workers may have left
        self._is_busy = False
        for worker_id, worker in self._pool.workers.items():
            load = worker.books.load
            if load.in_flight:
                self._is_busy = True
            state = (
                *(load.in_flight, load.queued_tokens, load.queued_s, load.context_tokens),
                *(load.progress_at_s, load.restore_until_s),
            )
            if is_full:
                counts = load.in_flight or load.restore_until_s > now_s
                if not counts and now_s - load.progress_at_s > PROGRESS_S:
                    sent[worker_id] = state
                    continue
            elif sent.get(worker_id, _NOTHING) == state:
                continue
            sent[worker_id] = state
            rows.append(
                LoadRow(
                    worker_id,
                    load.in_flight,
                    load.queued_tokens,
                    micros(load.queued_s),
                    load.context_tokens,
                    micros(now_s - load.progress_at_s),
                    micros(load.restore_until_s - now_s),
                )
            )
        return rows


class LoadExchange:
    """The exchange of one process; one event loop only.

    From construction on, the pools' ``others``, ``pending`` and ``pending_texts`` are its own.

    Args:
        link: Connection to Redis; run by somebody else.
        pools: All pools.
        gateway: This process's id, unlike any other's.
        clock: Monotonic seconds; the dispatcher's.

    Attributes:
        errors: Hostile or broken messages and failed sends, by kind.
        num_heard: Reports of other gateways taken over.
        num_sent: Reports sent.
    """

    def __init__(
        self, link: Link, pools: Sequence[Pool], *, gateway: str, clock: Callable[[], float]
    ) -> None:
        self._link = link
        self._clock = clock
        self._gateway = gateway
        self._wake = asyncio.Event()
        self.channels = {
            name: Channel(pool, name, gateway, self._wake.set)
            for name, pool in ((link.key(pool.name, "load"), pool) for pool in pools)
        }
        self._heard_self_s = float("-inf")
        self.errors: Counter[str] = Counter()
        self.num_heard = 0
        self.num_sent = 0

    @property
    def is_connected(self) -> bool:
        """Whether what this gateway says comes back to it, so that the others' words would too."""
        return self._clock() - self._heard_self_s <= GONE_S

    @property
    def others(self) -> dict[str, OthersLoad]:
        """Pool name -> what the other gateways have in flight there."""
        return {channel.pool: channel.others for channel in self.channels.values()}

    def is_first(self, pool: str, subject: str) -> bool:
        """Say whether this gateway is the one to do something that one of them should do.

        All that hear each other agree on who it is, without asking anybody: the one whose id and
        the subject's hash together to the least. While nobody is heard, each does it itself.

        Args:
            pool: A pool's name.
            subject: What is to be done, for example a worker's id.
        """
        others = self.others[pool].gateways if self.is_connected else []
        ranks = [_rank(gateway, subject) for gateway in others]
        return all(_rank(self._gateway, subject) < rank for rank in ranks)

    def age_s(self, pool: str) -> float:
        """Return how old the view of a pool's other gateways is; infinite while it is unknown."""
        return self.others[pool].age_s(self._clock())

    async def run(self) -> None:
        """Exchange until cancelled; then say goodbye."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._talk())
                tasks.create_task(self._listen())
                tasks.create_task(self._look())
        finally:
            for channel in self.channels.values():
                channel.others.is_connected = False
            await self._say_goodbye()

    async def _talk(self) -> None:
        while True:
            self._wake.clear()
            now_s = self._clock()
            for name, channel in self.channels.items():
                payload = channel.due(now_s) if self._link.is_up else None
                if payload is not None and not await self._publish(name, payload):
                    channel.repeat()
            await asyncio.sleep(LEAD_GAP_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S - LEAD_GAP_S):
                    await self._wake.wait()

    async def _publish(self, name: str, payload: bytes) -> bool:
        try:
            await answer(self._link.client.publish(name, payload))
        except LINK_ERRORS as error:
            self._link.report(error)
            self.errors[f"send:{type(error).__name__}"] += 1
            return False
        self.num_sent += 1
        return True

    async def _listen(self) -> None:
        while True:
            if self._link.is_up:
                try:
                    await self._follow()
                except LINK_ERRORS as error:
                    self._link.report(error)
                    self.errors[f"listen:{type(error).__name__}"] += 1
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        async with self._link.blocking.pubsub(ignore_subscribe_messages=True) as subscription:
            await answer(subscription.subscribe(*self.channels))
            while True:
                message = await answer(subscription.get_message(timeout=LISTEN_S))
                if message is not None:
                    self.heard(message["channel"], message["data"])

    def heard(self, name: bytes, data: object) -> None:
        """Take one message; whatever is wrong with it is counted and changes nothing."""
        now_s = self._clock()
        try:
            channel = self.channels[name.decode()]
            report = decode(data)
            if report.gateway == self._gateway:
                self._heard_self_s = now_s
                channel.others.is_connected = True
                return
            channel.heard(report, now_s)
            self.num_heard += 1
        except (BadMessage, KeyError, UnicodeDecodeError) as error:
            self.errors[type(error).__name__] += 1

    async def _look(self) -> None:
        was_connected = False
        while True:
            now_s, is_connected = self._clock(), self.is_connected
            for channel in self.channels.values():
                channel.look(now_s, is_connected=is_connected)
            if is_connected != was_connected:
                log.info("load_sharing", connected=is_connected)
                was_connected = is_connected
            await asyncio.sleep(LOOK_S)

    async def _say_goodbye(self) -> None:
        if not self._link.is_up:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                for name, channel in self.channels.items():
                    await self._publish(name, channel.goodbye())


def _rank(gateway: str, subject: str) -> int:
    """Return a gateway's place for a subject (rendezvous hashing)."""
    return xxhash.xxh3_64_intdigest(f"{gateway} {subject}".encode())
