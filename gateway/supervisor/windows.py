"""Means and quantiles over several processes: what they saw is merged, never their quantiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from gateway.telemetry.observed import FLEET, Recent
from gateway.telemetry.window import WINDOW_S, Summary

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gateway.telemetry.requests import Telemetry


class ProcessWindows(msgspec.Struct):
    """What one process saw in the last minutes.

    Attributes:
        at_s: When it said so; processes of one machine share the monotonic clock.
        fleet: Of all workers.
        workers: Of each of them.
    """

    at_s: float
    fleet: Recent
    workers: dict[str, Recent]


def pack(telemetry: Telemetry) -> bytes:
    """Return what this process saw, as JSON."""
    telemetry.settle()
    now_s = telemetry.now_s()
    workers = {worker: observed.recent(now_s) for worker, observed in telemetry.workers.items()}
    return msgspec.json.encode(ProcessWindows(now_s, telemetry.fleet.recent(now_s), workers))


def unpack(data: bytes) -> ProcessWindows:
    """Read what ``pack`` wrote.

    Raises:
        msgspec.MsgspecError: If it is anything else.
    """
    return msgspec.json.decode(data, type=ProcessWindows)


def merging_windows(
    processes: Iterable[ProcessWindows], now_s: float, scopes: dict[tuple[str, str], Recent]
) -> Iterator[None]:
    """Put together what all processes saw, in steps.

    Args:
        processes: What they said last; who stands still for a whole window has nothing to say.
        now_s: Monotonic seconds.
        scopes: Gets it, by the labels of the bare names.
    """
    scopes[FLEET] = Recent(Summary())
    for process in processes:
        if process.at_s > now_s - WINDOW_S:
            scopes[FLEET].add(process.fleet)
            for worker, recent in process.workers.items():
                scopes.setdefault(("worker", worker), Recent(Summary())).add(recent)
                yield
