"""What each configured tenant used: requests, tokens, and the seconds that reuse saved it.

Counts only grow, from the start of the process; tenants that are not configured are one row, so
that whoever names tenants in a header cannot make more of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.tenancy.tenancy import used_tokens

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

    from gateway.telemetry.record import RequestRecord

# Stands for all who are no configured tenant.
OTHER = "other"


@dataclass(slots=True)
class TenantUsage:
    """The sums of one tenant.

    Attributes:
        requests: Finished requests, refused ones included.
        prompt_tokens: Of requests that a worker served, even in part; as workers reported them.
        cached_tokens: Those of them that workers reported as cached.
        output_tokens: Completion tokens.
        saved_s: Prefill seconds that hits made unnecessary, less what bringing them back took.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    saved_s: float = 0.0


class UsageAccount:
    """The tenants of one process; event loop only.

    Args:
        is_configured: Whether a tenant of that name is configured now.
        overflows: Label -> times that a value of it had no series; counted here.
    """

    def __init__(self, is_configured: Callable[[str], bool], overflows: Counter[str]) -> None:
        self._is_configured = is_configured
        self._overflows = overflows
        self._tenants: dict[str, TenantUsage] = {}
        self._rest = TenantUsage()

    def observe(self, record: RequestRecord) -> None:
        """Take note of a finished request; about a microsecond, never raises."""
        usage = self._of(record.tenant)
        if usage is self._rest and record.tenant:
            self._overflows["tenant"] += 1
        usage.requests += 1
        prompt_tokens, output_tokens = used_tokens(record)
        usage.prompt_tokens += prompt_tokens
        usage.output_tokens += output_tokens
        if prompt_tokens:
            usage.cached_tokens += min(record.observed_hit_tokens or 0, prompt_tokens)

    def saved(self, tenant: str, saved_s: float) -> None:
        """Take note of what a hit saved."""
        self._of(tenant).saved_s += saved_s

    def items(self) -> Iterator[tuple[str, TenantUsage]]:
        """Yield names and sums of all tenants that sent a request, ``other`` last."""
        yield from self._tenants.items()
        if self._rest.requests:
            name = OTHER
            while name in self._tenants or self._is_configured(name):
                name += "_"  # somebody is called so, and two series must not have one name
            yield name, self._rest

    def _of(self, tenant: str) -> TenantUsage:
        usage = self._tenants.get(tenant)
        if usage is None:
            if not tenant or not self._is_configured(tenant):
                return self._rest
            # One that leaves the configuration keeps its row: what it used was used.
            usage = self._tenants[tenant] = TenantUsage()
        return usage
