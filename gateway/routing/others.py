"""What the other gateways have routed to the same workers, as they last said.

One gateway's own books are exact and say nothing of the rest. Here stands the rest, summed per
worker on this process's monotonic clock; ``gateway/replicas/`` keeps it current. Nothing is ever
asked for: what is not known by now does not count, and ``age_s`` says how old the picture is.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

# A gateway silent for this long is gone: killed, cut off, or too busy to be believed. Three missed
# heartbeats.
GONE_S = 1.5
# A gateway with nothing in flight speaks this often. Until then its silence is no age: it speaks at
# once when something is in flight.
HEARTBEAT_S = 0.5
# Multiples of 2**-20 s (about a microsecond) add and subtract without rounding, so that sums taken
# apart in another order return to exactly zero.
_GRAIN_PER_S = float(1 << 20)


class WorkerLoad(msgspec.Struct, gc=False):
    """Requests in flight on one worker; times are seconds on this process's monotonic clock.

    Attributes:
        in_flight: Requests routed there and not finished (``n``).
        queued_tokens: Uncached prompt tokens routed there without a first token (``Qtok``).
        queued_s: Their prefill seconds as estimated when routed (``Qsec``).
        context_tokens: Prompt tokens + allowance of the in-flight requests (``ctx``).
        progress_at_s: Last first token, or the last routing that found no queue (``t1``).
        restore_until_s: When the restores booked there end.
    """

    in_flight: int = 0
    queued_tokens: int = 0
    queued_s: float = 0.0
    context_tokens: int = 0
    progress_at_s: float = 0.0
    restore_until_s: float = 0.0


class _Report:
    """What one gateway said last, and when it was heard."""

    __slots__ = ("heard_s", "in_flight", "loads")

    def __init__(self) -> None:
        self.heard_s = 0.0
        self.in_flight = 0
        self.loads: dict[str, WorkerLoad] = {}


class OthersLoad:
    """The other gateways' load on the workers of one pool; one event loop only.

    ``report``, ``leave``, ``expire`` and ``is_connected`` are for whoever listens to the others;
    routing reads ``of`` and ``age_s``.

    Attributes:
        is_connected: Whether the others can be heard. While they cannot, ``age_s`` is infinite.
    """

    def __init__(self) -> None:
        self.is_connected = True
        self._reports: dict[str, _Report] = {}
        self._sums: dict[str, WorkerLoad] = {}

    def __len__(self) -> int:
        """Return the number of other gateways that are heard."""
        return len(self._reports)

    def of(self, worker_id: str) -> WorkerLoad | None:
        """Return the sum over the other gateways; None while none of them ever used the worker.

        Counts add up; the times are the latest of all. The object changes with the next report.
        """
        return self._sums.get(worker_id)

    def age_s(self, now_s: float) -> float:
        """Return how old the oldest part of the picture is.

        Returns:
            0 when there are no other gateways, or none that is late; infinite while they cannot be
            heard.
        """
        if not self.is_connected:
            return inf
        oldest_s = 0.0
        for report in self._reports.values():
            age_s = now_s - report.heard_s
            if not report.in_flight:
                age_s -= HEARTBEAT_S
            if age_s > oldest_s:
                oldest_s = age_s
        return oldest_s

    def report(
        self, gateway: str, loads: Mapping[str, WorkerLoad], now_s: float, *, is_full: bool = True
    ) -> None:
        """Replace what a gateway has in flight.

        Args:
            gateway: Its id.
            loads: Workers and what it has there; kept, not copied.
            now_s: When it was heard.
            is_full: Whether it has nothing on all other workers; else they are as before.
        """
        report = self._reports.get(gateway)
        if report is None:
            report = self._reports[gateway] = _Report()
        report.heard_s = now_s
        before = report.loads
        if is_full:
            for worker_id in [known for known in before if known not in loads]:
                self._replace(report, worker_id, before.pop(worker_id), None)
        for worker_id, load in loads.items():
            load.queued_s = round(load.queued_s * _GRAIN_PER_S) / _GRAIN_PER_S
            self._replace(report, worker_id, before.get(worker_id), load)
            before[worker_id] = load

    def leave(self, gateway: str) -> None:
        """Drop a gateway that said goodbye or is gone; one that is unknown is no harm."""
        report = self._reports.pop(gateway, None)
        if report is not None:
            for worker_id, load in report.loads.items():
                self._replace(report, worker_id, load, None)
        if not self._reports:
            self._sums.clear()

    @property
    def gateways(self) -> list[str]:
        """Ids of the other gateways that are heard."""
        return list(self._reports)

    def knows(self, gateway: str) -> bool:
        """Say whether a gateway is heard."""
        return gateway in self._reports

    def expire(self, now_s: float) -> list[str]:
        """Drop the gateways that were silent for more than ``GONE_S``; return their ids."""
        gone = [g for g, report in self._reports.items() if now_s - report.heard_s > GONE_S]
        for gateway in gone:
            self.leave(gateway)
        return gone

    def _replace(
        self, report: _Report, worker_id: str, before: WorkerLoad | None, after: WorkerLoad | None
    ) -> None:
        total = self._sums.get(worker_id)
        if total is None:
            total = self._sums[worker_id] = WorkerLoad()
        if before is not None:
            report.in_flight -= before.in_flight
            total.in_flight -= before.in_flight
            total.queued_tokens -= before.queued_tokens
            total.queued_s -= before.queued_s
            total.context_tokens -= before.context_tokens
        if after is not None:
            report.in_flight += after.in_flight
            total.in_flight += after.in_flight
            total.queued_tokens += after.queued_tokens
            total.queued_s += after.queued_s
            total.context_tokens += after.context_tokens
            # Progress that somebody saw was made, whoever leaves later.
            if after.progress_at_s > total.progress_at_s:
                total.progress_at_s = after.progress_at_s
            if after.restore_until_s > total.restore_until_s:
                total.restore_until_s = after.restore_until_s
