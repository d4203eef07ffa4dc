"""What a tenant may use per minute, and how its clients are told of it."""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from gateway.errors import RateLimited
from gateway.tenancy.buckets import Bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gateway.config import TenantConfig

REQUESTS, TOKENS = "requests", "tokens"
# A client that is told to wait less comes back before anything has changed.
MIN_RETRY_S = 0.05
_OPENAI_LINES = {
    name: (
        f"x-ratelimit-limit-{name}: %d\r\n"
        f"x-ratelimit-remaining-{name}: %d\r\n"
        f"x-ratelimit-reset-{name}: %b\r\n"
    ).encode()
    for name in (REQUESTS, TOKENS)
}


class Budget:
    """The limits of one tenant; event loop only.

    Args:
        tenant: Its name.
        buckets: By resource, those that are limited.

    Attributes:
        buckets: As given.
    """

    __slots__ = ("buckets", "requests", "tenant", "tokens")

    def __init__(self, tenant: str, buckets: dict[str, Bucket]) -> None:
        self.tenant = tenant
        self.buckets = buckets
        self.requests = buckets.get(REQUESTS)
        self.tokens = buckets.get(TOKENS)

    def take(self, tokens: int, now_s: float) -> tuple[str, float]:
        """Charge one request of ``tokens``, or say what is short and for how long.

        Returns:
            The resource that is short (empty = charged) and the seconds until it is not.
        """
        requests, bucket = self.requests, self.tokens
        wait_s = 0.0 if requests is None else requests.wait_s(1.0, now_s)
        if wait_s > 0.0:
            return REQUESTS, wait_s
        if bucket is not None:
            wait_s = bucket.wait_s(tokens, now_s)
            if wait_s > 0.0:
                return TOKENS, wait_s
            bucket.spend(tokens)
        if requests is not None:
            requests.spend(1.0)
        return "", 0.0

    def openai_lines(self, now_s: float) -> bytes:
        """Return the header lines by which OpenAI tells what is left."""
        return b"".join(
            [
                _OPENAI_LINES[name]
                % (
                    bucket.limit,
                    int(bucket.remaining(now_s)),
                    duration(bucket.reset_s(now_s)).encode(),
                )
                for name, bucket in self.buckets.items()
            ]
        )

    def anthropic_lines(self, now_s: float, now_unix_s: float) -> bytes:
        """Return the header lines by which Anthropic tells what is left."""
        lines = ""
        for name, bucket in self.buckets.items():
            at = datetime.fromtimestamp(math.ceil(now_unix_s + bucket.reset_s(now_s)), UTC)
            start = f"anthropic-ratelimit-{name}"
            lines += (
                f"{start}-limit: {bucket.limit:.0f}\r\n"
                f"{start}-remaining: {math.floor(bucket.remaining(now_s))}\r\n"
                f"{start}-reset: {at:%Y-%m-%dT%H:%M:%SZ}\r\n"
            )
        return lines.encode()


class Grant:
    """One admitted request: what it was charged, until it is known what it took.

    Args:
        budget: Of its tenant; None = nothing is counted.
        prompt_tokens: Estimate that was charged.
        completion_tokens: Estimate that was charged.
    """

    __slots__ = ("_budget", "_completion_tokens", "_prompt_tokens")

    def __init__(
        self, budget: Budget | None = None, prompt_tokens: int = 0, completion_tokens: int = 0
    ) -> None:
        self._budget = budget
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = completion_tokens

    def settle(self, prompt_tokens: int | None, completion_tokens: int | None) -> None:
        """Charge what the request took instead of the estimate; further calls change nothing.

        Args:
            prompt_tokens: None where nobody told.
            completion_tokens: Likewise.
        """
        budget, self._budget = self._budget, None
        if budget is None or budget.tokens is None:
            return
        estimate = self._prompt_tokens + self._completion_tokens
        if prompt_tokens is None:
            prompt_tokens = self._prompt_tokens
        if completion_tokens is None:
            completion_tokens = self._completion_tokens
        if prompt_tokens + completion_tokens != estimate:
            budget.tokens.spend(prompt_tokens + completion_tokens - estimate)


class Budgets:
    """The budgets of all tenants of one process; event loop only.

    Args:
        clock: Monotonic seconds.

    Attributes:
        num_refused: (tenant, resource) -> requests refused.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.num_refused: Counter[tuple[str, str]] = Counter()
        self._clock = clock
        self._budgets: dict[str, Budget] = {}
        # All there ever were: a configuration names few in a process's life.
        self._known: dict[tuple[str, str], Bucket] = {}
        self._share, self._is_alone = 1.0, False

    def __iter__(self) -> Iterator[Budget]:
        return iter(self._budgets.values())

    def get(self, tenant: str) -> Budget | None:
        """Return a tenant's budget; None if it has none."""
        return self._budgets.get(tenant)

    def reload(self, tenants: tuple[TenantConfig, ...]) -> None:
        """Have these tenants' limits from now on; what was spent stays spent."""
        self._budgets = {}
        for config in tenants:
            limits = {REQUESTS: config.requests_per_min, TOKENS: config.tokens_per_min}
            buckets = {
                name: self._bucket(config.name, name, limit)
                for name, limit in limits.items()
                if limit is not None
            }
            if buckets:
                self._budgets[config.name] = Budget(config.name, buckets)
        self.set_share(self._share, is_alone=self._is_alone)

    def _bucket(self, tenant: str, resource: str, limit: int) -> Bucket:
        """Return a bucket, the one from before if there was one: others know its spending."""
        now_s = self._clock()
        known = self._known.get((tenant, resource))
        if known is None:
            known = self._known[tenant, resource] = Bucket(limit, now_s)
        else:
            known.resize(limit, now_s)
        return known

    def set_share(self, share: float, *, is_alone: bool) -> None:
        """Say which part of all budgets is this gateway's, and whether others are not heard."""
        self._share, self._is_alone = share, is_alone
        now_s = self._clock()
        for budget in self:
            for bucket in budget.buckets.values():
                if (bucket.share, bucket.is_alone) != (share, is_alone):
                    bucket.set_share(share, is_alone=is_alone, now_s=now_s)

    def remaining(self, budget: Budget) -> dict[str, float]:
        """Return what is left by resource."""
        now_s = self._clock()
        return {name: bucket.remaining(now_s) for name, bucket in budget.buckets.items()}

    def refusal(self, budget: Budget, resource: str, wait_s: float) -> RateLimited:
        """Count a refused request and return the error for it."""
        self.num_refused[budget.tenant, resource] += 1
        limit = budget.buckets[resource].limit
        return RateLimited(
            f"The limit of {limit:.0f} {resource} per minute is reached; try again in "
            f"{duration(wait_s)}.",
            code="rate_limit_exceeded",
            retry_after_s=max(MIN_RETRY_S, wait_s),
        )


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: ``340ms``, ``8.5s``, ``6m0s``, ``1h2m3s``."""
    millis = math.ceil(max(0.0, seconds) * 1000.0)
    if millis < 1000:
        return f"{millis}ms"
    if millis < 60_000:
        return f"{millis / 1000:g}s"
    minutes, rest = divmod(math.ceil(millis / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
