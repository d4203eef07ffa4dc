"""Means and quantiles over several processes: their windows are merged, never their quantiles.

Processes of one machine share the monotonic clock, so their time slots are the same slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from gateway.telemetry.requests import Observed
from gateway.telemetry.window import Slot  # noqa: TC001  # msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gateway.telemetry.requests import Telemetry


class ObservedWindows(msgspec.Struct):
    """The windows behind one scope's gauges."""

    ttft_s: list[Slot]
    hits: list[Slot]
    misses: list[Slot]


class ProcessWindows(msgspec.Struct):
    """All windows of one process."""

    fleet: ObservedWindows
    workers: dict[str, ObservedWindows]


def pack(telemetry: Telemetry) -> bytes:
    """Return the windows of this process as JSON."""
    workers = {worker: _pack(observed) for worker, observed in telemetry.workers.items()}
    return msgspec.json.encode(ProcessWindows(_pack(telemetry.fleet), workers))


def unpack(data: bytes) -> ProcessWindows:
    """Read what ``pack`` wrote.

    Raises:
        msgspec.MsgspecError: If it is anything else.
    """
    return msgspec.json.decode(data, type=ProcessWindows)


def gauge_lines(processes: list[ProcessWindows], now_s: float) -> Iterator[str]:
    """Yield the exposition of the windowed gauges of all processes together."""
    scopes: dict[tuple[str, str], Observed] = {("fleet", ""): Observed()}
    for process in processes:
        _add(scopes["fleet", ""], process.fleet)
        for worker, windows in process.workers.items():
            _add(scopes.setdefault(("worker", worker), Observed()), windows)
    gauges: dict[str, tuple[str, Callable[[Observed], float | None]]] = {
        "prefix_cache_hit_rate": (
            "Share of prompt tokens found cached, last 5 minutes",
            lambda o: o.hit_rate(now_s),
        ),
        "ttft_avg": ("Mean TTFT, seconds, last 5 minutes", lambda o: o.ttft_s.mean(now_s)),
        "ttft_p95": (
            "95th percentile of TTFT, seconds, last 5 minutes",
            lambda o: o.ttft_s.quantile(0.95, now_s),
        ),
        "ttft_p99": (
            "99th percentile of TTFT, seconds, last 5 minutes",
            lambda o: o.ttft_s.quantile(0.99, now_s),
        ),
    }
    for name, (text, read) in gauges.items():
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} gauge"
        for (scope, worker), observed in scopes.items():
            value = read(observed)
            if value is not None:
                yield f'{name}{{scope="{scope}",worker="{worker}"}} {value}'


def _pack(observed: Observed) -> ObservedWindows:
    return ObservedWindows(observed.ttft_s.slots(), observed.hits.slots(), observed.misses.slots())


def _add(observed: Observed, windows: ObservedWindows) -> None:
    observed.ttft_s.merge(windows.ttft_s)
    observed.hits.merge(windows.hits)
    observed.misses.merge(windows.misses)
