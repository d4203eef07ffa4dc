"""Usage and cache values as the rest of the gateway uses them: fed by finished requests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from gateway.routing.cost import prefill_s
from gateway.routing.outcome import OK
from gateway.usage.account import UsageAccount
from gateway.usage.cache_value import CacheValues
from gateway.usage.document import usage_document
from gateway.usage.hints import HintCounts
from gateway.usage.scale_down import scale_down

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from gateway.routing.plan import Plan
    from gateway.routing.pool import Pool
    from gateway.routing.ticket import Ticket
    from gateway.telemetry.record import RequestRecord


class Usage:
    """Account and values of one process; event loop only.

    Args:
        pools: All.
        is_configured: Whether a tenant of that name is configured now.
        overflows: Gets how often a named tenant had no row of its own.
        clock: Monotonic seconds.
        clock_unix: Seconds since 1970.

    Attributes:
        account: What tenants used.
        values: What workers' caches save.
        hints: How many requests name their documents.
        settle: Has what waits counted; whoever reads calls it first. Set by who lets it wait.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        is_configured: Callable[[str], bool],
        overflows: Counter[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        clock_unix: Callable[[], float] = time.time,
    ) -> None:
        self.account = UsageAccount(is_configured, overflows)
        self.values = CacheValues(pools)
        self.hints = HintCounts()
        self.settle: Callable[[], None] = lambda: None
        self._clock = clock
        self._clock_unix = clock_unix
        self._since_unix_s = clock_unix()

    def observe(self, record: RequestRecord) -> None:
        """Take note of a request of a client that is over. A microsecond; never raises."""
        self.account.observe(record)

    def finished(self, plan: Plan, ticket: Ticket) -> None:
        """Take note of an attempt that is over. A few microseconds; never raises."""
        if ticket.outcome is not OK:
            return
        self.hints.add(plan)
        saved_s = saved_by_hit_s(plan, ticket)
        self.values.add(plan.pool.name, ticket.worker, saved_s, self._clock())
        if saved_s:
            self.account.saved(plan.inbound.tenant, saved_s)

    def document(self) -> dict[str, Any]:
        """Return ``GET /admin/v1/usage``, as plain JSON values."""
        self.settle()
        return usage_document(self.account.items(), self._since_unix_s, self._clock_unix())

    def worth(self) -> dict[str, Any]:
        """Return what ``GET /admin/v1/worth`` says besides: workers, scale-down advice, hints."""
        self.settle()
        rows = [value._asdict() for value in self.values.read(self._clock())]
        return {"workers": rows, "scale_down": scale_down(rows), "hints": self.hints.rows()}


def saved_by_hit_s(plan: Plan, ticket: Ticket) -> float:
    """Return the prefill seconds that a request's cached tokens made unnecessary.

    Priced with the constants of the worker that served it, less what bringing them back from lower
    tiers or peers was expected to take; 0 where nothing was reported or the speed is unknown, and
    where a restore took longer than it saved.
    """
    model, hit_tokens = ticket.worker.learner.model, ticket.observed_hit_tokens
    if model is None or not hit_tokens:
        return 0.0
    prompt_tokens = plan.num_tokens
    uncached_tokens = max(0, prompt_tokens - hit_tokens)
    whole_s = prefill_s(model, prompt_tokens, prompt_tokens)
    own_s = prefill_s(model, uncached_tokens, prompt_tokens)
    return max(0.0, whole_s - own_s - ticket.decision.estimate().restore_s)
