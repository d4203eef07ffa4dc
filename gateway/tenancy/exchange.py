"""Budgets that several gateways keep together, without asking anybody on a request's path.

Each gateway decides by its own buckets and tells the others ten times a second what it spent; what
they tell is taken off its buckets. Between two reports each spends its fair share of what was left
(``gateway/tenancy/buckets.py``), so the most that N gateways grant together beyond a budget is one
request each per report, N - 1 in all, and it is repaid. Tokens are charged as estimates, so real
usage may exceed a budget by what the running requests were estimated too low; that is repaid too.
Without Redis each gateway lives on one share of N, N as last heard (and at least the processes of
this gateway): together they stay within the budget.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.tenancy.spending import MAX_ROWS, BadSpendingError, Row, decode, encode
from prefix_index.replica.link import LINK_ERRORS, answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gateway.tenancy.buckets import Bucket
    from gateway.tenancy.budgets import Budgets
    from prefix_index.replica.link import Link

# How old others' spending may be.
BEAT_S = 0.1
# All budgets that are not full are told again so often: to who has just started, and to make up for
# lost messages.
FULL_S = 1.0
# A gateway that said nothing for so long is gone.
GONE_S = 3.5
RETRY_S = 0.2
LISTEN_S = 0.5
# Other gateways remembered; nobody runs more.
MAX_GATEWAYS = 256


@dataclass(slots=True)
class _Told:
    """What one gateway has told: its totals, and whether all others are zero."""

    totals: dict[tuple[str, str], float]
    is_complete: bool = False


class BudgetExchange:
    """The exchange of one process; one event loop only.

    Args:
        link: Connection to Redis; run by somebody else.
        budgets: This process's.
        gateway: This process's id, unlike any other's.
        clock: Monotonic seconds; the budgets'.
        processes: Processes of this gateway: so many share the budgets whatever is heard.

    Attributes:
        errors: Broken messages and failed sends, by kind.
        num_heard: Reports of other gateways taken over.
    """

    def __init__(
        self,
        link: Link,
        budgets: Budgets,
        *,
        gateway: str,
        clock: Callable[[], float],
        processes: int = 1,
    ) -> None:
        self.errors: Counter[str] = Counter()
        self.num_heard = 0
        self._link = link
        self._budgets = budgets
        self._gateway = gateway
        self._clock = clock
        self._processes = processes
        self._channel = link.key("tenants", "spending")
        # Gateway -> when it was heard last, and what it had told by then, gone or not.
        self._heard_s: dict[str, float] = {}
        self._told: dict[str, _Told] = {}
        self._sent: dict[tuple[str, str], float] = {}
        self._full_sent_s = self._heard_self_s = float("-inf")
        self._num_gateways = processes
        budgets.set_share(1.0 / processes, is_alone=True)

    @property
    def is_connected(self) -> bool:
        """Whether what this gateway says comes back to it, so that the others' words would too."""
        return self._clock() - self._heard_self_s <= GONE_S

    @property
    def num_gateways(self) -> int:
        """How many share the budgets, this one among them."""
        return self._num_gateways

    async def run(self) -> None:
        """Exchange until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._talk())
            tasks.create_task(self._listen())

    async def _talk(self) -> None:
        while True:
            self.look()
            if self._link.is_up:
                for payload in self.due():
                    if not await self._publish(payload):
                        self._full_sent_s = float("-inf")
                        break
            await asyncio.sleep(BEAT_S)

    def look(self) -> None:
        """Forget gateways that are gone, and share with those that are there."""
        now_s = self._clock()
        for gateway in [g for g, s in self._heard_s.items() if now_s - s > GONE_S]:
            del self._heard_s[gateway]
        if self.is_connected:
            self._num_gateways = max(1 + len(self._heard_s), self._processes)
        self._budgets.set_share(1.0 / self._num_gateways, is_alone=not self.is_connected)

    def due(self) -> Iterator[bytes]:
        """Yield the messages that are due, and take them as said."""
        now_s = self._clock()
        is_full = now_s - self._full_sent_s >= FULL_S
        if is_full:
            self._full_sent_s = now_s
        rows = []
        for tenant, resource, bucket in self._buckets():
            key = (tenant, resource)
            is_news = self._sent.get(key, 0.0) != bucket.spent
            balance = bucket.balance(now_s)
            if is_news or (is_full and balance < bucket.limit):
                self._sent[key] = bucket.spent
                bucket.reported()
                rows.append(Row(tenant, resource, bucket.spent, balance))
        while len(rows) > MAX_ROWS:
            yield encode(self._gateway, tuple(rows[:MAX_ROWS]), is_full=False)
            del rows[:MAX_ROWS]
        if rows or is_full:
            yield encode(self._gateway, tuple(rows), is_full=is_full)

    def heard(self, data: object) -> None:
        """Take one message; whatever is wrong with it is counted and changes nothing."""
        now_s = self._clock()
        try:
            report = decode(data)
        except BadSpendingError:
            self.errors["bad_message"] += 1
            return
        if report.gateway == self._gateway:
            self._heard_self_s = now_s
            return
        told = self._told.get(report.gateway)
        if told is None:
            if len(self._told) >= MAX_GATEWAYS:
                self._forget_oldest()
            told = self._told[report.gateway] = _Told({})
        if report.gateway not in self._heard_s:
            self._heard_s[report.gateway] = now_s
            self.look()
        self._heard_s[report.gateway] = now_s
        self.num_heard += 1
        for row in report.rows:
            self._take(row, told, now_s)
        told.is_complete = told.is_complete or report.is_full

    def _take(self, row: Row, told: _Told, now_s: float) -> None:
        budget = self._budgets.get(row.tenant)
        bucket = None if budget is None else budget.buckets.get(row.resource)
        if bucket is None:
            return  # not configured here
        key = (row.tenant, row.resource)
        before = told.totals.get(key)
        told.totals[key] = row.spent
        if before is None and not told.is_complete:
            # This gateway has just started: what the other knows counts what was spent before.
            bucket.adopt(row.balance, now_s)
        else:
            bucket.spent_elsewhere(row.spent - (before or 0.0), now_s)

    def _forget_oldest(self) -> None:
        oldest = min(self._told, key=lambda g: self._heard_s.get(g, float("-inf")))
        del self._told[oldest]
        self._heard_s.pop(oldest, None)

    def _buckets(self) -> Iterator[tuple[str, str, Bucket]]:
        for budget in self._budgets:
            for resource, bucket in budget.buckets.items():
                yield budget.tenant, resource, bucket

    async def _publish(self, payload: bytes) -> bool:
        try:
            await answer(self._link.client.publish(self._channel, payload))
        except LINK_ERRORS as error:
            self._link.report(error)
            self.errors[f"send:{type(error).__name__}"] += 1
            return False
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
            await answer(subscription.subscribe(self._channel))
            while True:
                message = await answer(subscription.get_message(timeout=LISTEN_S))
                if message is not None:
                    self.heard(message["data"])
