"""One word for what a worker does with new requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.routing.pool import Worker


def worker_state(worker: Worker, now_s: float) -> str:
    """Return ``ready``, ``draining``, ``not_ready``, ``warming``, ``open`` or ``half_open``.

    Args:
        worker: Any worker.
        now_s: Monotonic seconds.
    """
    if worker.draining:
        return "draining"
    if not worker.health.ready:
        return "not_ready"
    if worker.slow_start is not None:
        return "warming"
    breaker = worker.health.breaker(now_s)
    return "ready" if breaker == "closed" else breaker.value
