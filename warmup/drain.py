"""After Ctrl-C: the stream is closed, and the gateway is asked how what was in flight ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warmup.gateway_client import AwayError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmup.gateway_client import Gateway

# A long prefill may run on; nobody who pressed Ctrl-C waits for it longer.
DRAIN_S = 30.0
POLL_S = 0.5


def wait_for_end(
    gateway: Gateway, run_id: str, *, clock: Callable[[], float], sleep: Callable[[float], None]
) -> dict[str, Any] | None:
    """Wait until a run has ended at the gateway, and return what it tells of it.

    Returns:
        The run; None if the gateway does not know it, does not answer or takes too long.
    """
    end_s = clock() + DRAIN_S
    while clock() < end_s:
        try:
            runs = gateway.runs()["runs"]
        except (AwayError, RefusedError):
            return None
        run = next((run for run in runs if run.get("run_id") == run_id), None)
        if run is None or run.get("state") not in ("running", "stopping"):
            return run
        sleep(POLL_S)
    return None
