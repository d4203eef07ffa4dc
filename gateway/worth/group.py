"""What one group of requests (a pool, a tenant, a document) did in the last hour, older fading."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, NamedTuple

from gateway.worth.rule import Terms, Verdict, judge

if TYPE_CHECKING:
    from gateway.worth.rule import Worth
    from prefix_index.blocks import BlockHash

# A steady rate of r an hour shows as r.
WINDOW_S = 3600.0
# Fading of less than this is left for the next time: exp() and ten products a request add up.
_MIN_FADE_S = 1.0
# How long a verdict stands before it is looked at again.
_VERDICT_S = 5.0


class Rate(NamedTuple):
    """How quickly a pool's lower tier gives KV back.

    Attributes:
        tokens_per_s: Its effective bandwidth.
        is_measured: Whether restores were seen; else it is what workers start with.
    """

    tokens_per_s: float
    is_measured: bool


# Its constructor is written out, since one that a dataclass makes itself is not compiled.
@dataclass(slots=True, init=False)
class Use:
    """One finished request, priced with the constants of the worker that served it.

    Attributes:
        prompt_tokens: Prompt length.
        shared_tokens: Leading tokens that had been computed before.
        lost_tokens: Those of them that no worker held any more.
        recompute_s: Prefill of the shared tokens.
        store_tokens: New tokens that the tier would be given.
        write_tokens: Tokens that could be read in the time it takes to write those.
        eviction_s: Recompute of what they would push out.
        prefill_token_s: ``c`` of the worker.
    """

    prompt_tokens: int
    shared_tokens: int
    lost_tokens: int
    recompute_s: float
    store_tokens: int
    write_tokens: float
    eviction_s: float
    prefill_token_s: float

    def __init__(
        self,
        prompt_tokens: int,
        shared_tokens: int,
        lost_tokens: int,
        recompute_s: float,
        store_tokens: int,
        write_tokens: float,
        eviction_s: float,
        prefill_token_s: float,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.shared_tokens = shared_tokens
        self.lost_tokens = lost_tokens
        self.recompute_s = recompute_s
        self.store_tokens = store_tokens
        self.write_tokens = write_tokens
        self.eviction_s = eviction_s
        self.prefill_token_s = prefill_token_s


class Group:
    """Fading sums; one event loop only.

    Attributes:
        kind: Kind of the identity; empty for pools and tenants.
        tenant: Tenant; empty for pools.
        requests: Finished requests, and so on as in ``Use``.
        shared_end: Last block of what its last reuse shared with requests before; None without one.
        shared_end_tokens: Tokens up to there.
    """

    __slots__ = (
        *("_at_s", "_judged_s", "_verdict", "eviction_s", "kind", "lost_tokens"),
        *("prefill_s", "prompt_tokens", "recompute_s", "requests", "reuses"),
        *("shared_end", "shared_end_tokens", "shared_tokens", "store_tokens", "tenant"),
        "write_tokens",
    )

    def __init__(self, now_s: float, *, tenant: str = "", kind: str = "") -> None:
        self.tenant = tenant
        self.kind = kind
        self.shared_end: BlockHash | None = None
        self.shared_end_tokens = 0
        self.requests = self.reuses = 0.0
        self.prompt_tokens = self.shared_tokens = self.lost_tokens = self.store_tokens = 0.0
        self.recompute_s = self.write_tokens = self.eviction_s = 0.0
        # Sum of c over requests: its mean is the group's price of a token.
        self.prefill_s = 0.0
        self._at_s = now_s
        self._judged_s = float("-inf")
        self._verdict = Verdict.UNKNOWN

    def add(self, use: Use, now_s: float) -> None:
        """Take a finished request."""
        if now_s - self._at_s >= _MIN_FADE_S:
            self.fade(now_s)
        self.requests += 1.0
        self.prompt_tokens += use.prompt_tokens
        self.store_tokens += use.store_tokens
        self.write_tokens += use.write_tokens
        self.eviction_s += use.eviction_s
        self.prefill_s += use.prefill_token_s
        if use.shared_tokens:
            self.reuses += 1.0
            self.shared_tokens += use.shared_tokens
            self.lost_tokens += use.lost_tokens
            self.recompute_s += use.recompute_s

    def absorb(self, other: Group, now_s: float) -> None:
        """Add another group's sums to these."""
        self.fade(now_s)
        other.fade(now_s)
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def fade(self, now_s: float) -> None:
        """Let what is older count less."""
        passed_s = now_s - self._at_s
        if passed_s <= 0.0:
            return
        self._at_s = now_s
        keep = exp(-passed_s / WINDOW_S)
        for name in _SUMS:
            setattr(self, name, getattr(self, name) * keep)

    def terms(self, now_s: float, rate: Rate) -> Terms:
        """Return what the rule reads, with the tier as it is now."""
        self.fade(now_s)
        reuses = max(self.reuses, 1e-9)
        shared = self.shared_tokens / reuses
        return Terms(
            requests=self.requests,
            reuse_count=self.reuses,
            shared_prefix_tokens=shared,
            recompute_s=self.recompute_s / reuses,
            restore_s=shared / rate.tokens_per_s,
            store_s=self.write_tokens / rate.tokens_per_s,
            eviction_s=self.eviction_s,
            prefill_token_s=self.prefill_s / max(self.requests, 1e-9),
            restore_tokens_per_s=rate.tokens_per_s,
            is_measured=rate.is_measured,
        )

    def worth(self, now_s: float, rate: Rate) -> Worth:
        """Judge it as things are now."""
        return judge(self.terms(now_s, rate))

    def verdict(self, now_s: float, rate: Rate) -> Verdict:
        """Return a verdict that is at most some seconds old; for the request path."""
        if now_s - self._judged_s >= _VERDICT_S:
            self._judged_s = now_s
            self._verdict = self.worth(now_s, rate).verdict
        return self._verdict


_SUMS = (
    *("requests", "reuses", "prompt_tokens", "shared_tokens", "lost_tokens", "store_tokens"),
    *("recompute_s", "write_tokens", "eviction_s", "prefill_s"),
)
