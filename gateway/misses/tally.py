"""Tokens lost, by cause and by whose they are, over the last one to two hours; bounded.

A mended cause leaves the report by itself: the older of two windows is dropped every hour.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway.misses.causes import ADVICE, Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WINDOW_S = 3600.0
# Distinct groups of one window; what comes later is counted under an empty document and tenant.
MAX_GROUPS = 1024
# Groups listed under one cause.
MAX_LISTED = 10


@dataclass(frozen=True, slots=True)
class Loss:
    """One request's lost tokens.

    Attributes:
        cause: Why.
        segment: Part of the prompt where it diverges.
        pool: Pool.
        tenant: Tenant.
        model: Model name the client asked for.
        document: Document or knowledge base, where the client named one.
        tokens: Prompt tokens that were computed and need not have been.
        example: Plain JSON values that show the place.
    """

    cause: Cause
    segment: str
    pool: str
    tenant: str
    model: str
    document: str
    tokens: int
    example: dict[str, Any]


@dataclass(slots=True)
class Group:
    """Losses of one cause, segment, pool, tenant, model and document."""

    tokens: int = 0
    requests: int = 0
    example: dict[str, Any] = field(default_factory=dict)
    example_tokens: int = 0

    def add(self, tokens: int, requests: int, example: dict[str, Any], example_tokens: int) -> None:
        """Add losses; the most expensive example stays."""
        self.tokens += tokens
        self.requests += requests
        if example_tokens >= self.example_tokens:
            self.example, self.example_tokens = example, example_tokens


_Key = tuple[Cause, str, str, str, str, str]


class Tally:
    """Adds up losses; event loop only.

    Args:
        clock: Monotonic seconds.

    Attributes:
        tokens: Tokens lost since the start, by pool and cause: for counters.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.tokens: Counter[tuple[str, Cause]] = Counter()
        self._clock = clock
        self._windows: tuple[dict[_Key, Group], dict[_Key, Group]] = ({}, {})
        self._counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._begun_s = clock()
        self._older_s = self._begun_s

    def count(self, name: str, value: int = 1) -> None:
        """Add to one of the totals."""
        self._counts[0][name] += value

    def served(self, prompt_tokens: int, hit_tokens: int) -> None:
        """Count a request; on the path of every one."""
        counts = self._counts[0]
        counts["requests"] += 1
        counts["prompt_tokens"] += prompt_tokens
        counts["hit_tokens"] += hit_tokens

    def add(self, loss: Loss) -> None:
        """Count one request's loss."""
        self.rotate()
        self.tokens[loss.pool, loss.cause] += loss.tokens
        self.count("tokens_lost", loss.tokens)
        self.count("requests_with_loss")
        window = self._windows[0]
        key = (loss.cause, loss.segment, loss.pool, loss.tenant, loss.model, loss.document)
        if key not in window and len(window) >= MAX_GROUPS:
            key = (loss.cause, loss.segment, loss.pool, "", "", "")
        window.setdefault(key, Group()).add(loss.tokens, 1, loss.example, loss.tokens)

    def rotate(self) -> None:
        """Begin a new window if the hour is over."""
        now_s = self._clock()
        if now_s - self._begun_s < WINDOW_S:
            return
        is_idle = now_s - self._begun_s >= 2 * WINDOW_S
        self._windows = ({}, {} if is_idle else self._windows[0])
        self._counts = (Counter(), Counter() if is_idle else self._counts[0])
        self._older_s = now_s if is_idle else self._begun_s
        self._begun_s = now_s

    def forget(self, tenant: str | None, document: str) -> int:
        """Forget the groups of a tenant (None = of anybody) or of a document (empty = all).

        Returns:
            How many were forgotten; their tokens stay in the totals.
        """
        num_gone = 0
        for window in self._windows:
            gone = [key for key in window if _is_of(key, tenant, document)]
            for key in gone:
                del window[key]
            num_gone += len(gone)
        return num_gone

    def report(self) -> dict[str, Any]:
        """Return causes, most expensive first, and totals, as plain JSON values."""
        self.rotate()
        totals = self._counts[0] + self._counts[1]
        lost = totals["tokens_lost"]
        rows = sorted(self._rows(), key=lambda row: (-row["tokens_lost"], row["cause"]))
        for row in rows:
            row["share"] = round(row["tokens_lost"] / lost, 4) if lost else 0.0
        names = ("requests", "prompt_tokens", "hit_tokens", "requests_with_loss", "tokens_lost")
        sampling = ("compared", "not_compared", "failed")
        return {
            "causes": rows,
            "totals": {name: totals[name] for name in (*names, *sampling)}
            | {"window_s": round(self._clock() - self._older_s, 1)},
        }

    def _rows(self) -> Iterator[dict[str, Any]]:
        by_cause: dict[tuple[Cause, str], dict[_Key, Group]] = {}
        for window in self._windows:
            for key, group in window.items():
                merged = by_cause.setdefault(key[:2], {}).setdefault(key, Group())
                merged.add(group.tokens, group.requests, group.example, group.example_tokens)
        for (cause, segment), groups in by_cause.items():
            ranked = sorted(groups.items(), key=lambda item: item[1].tokens, reverse=True)
            yield {
                "cause": cause.value,
                "segment": segment,
                "tokens_lost": sum(group.tokens for group in groups.values()),
                "requests": sum(group.requests for group in groups.values()),
                "share": 0.0,
                "example": ranked[0][1].example,
                "advice": ADVICE[cause],
                "by": [_listed(key, group) for key, group in ranked[:MAX_LISTED]],
            }


def _is_of(key: _Key, tenant: str | None, document: str) -> bool:
    _, _, _, whose, _, about = key
    if tenant is not None and whose != tenant:
        return False
    name = about.partition(":")[2]
    return not document or document in (name, name.rpartition("@")[0])


def _listed(key: _Key, group: Group) -> dict[str, Any]:
    _, _, pool, tenant, model, document = key
    return {
        "pool": pool,
        "tenant": tenant,
        "model": model,
        "document": document,
        "tokens_lost": group.tokens,
        "requests": group.requests,
    }
