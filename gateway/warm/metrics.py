"""What warm-up did and what came of it, as metrics: read at scrape time, bounded by the workers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.core import Metric


class WarmCounts:
    """Sums since the start; event loop only.

    Attributes:
        computed_tokens: Worker id -> tokens it computed for warm-up.
        cached_tokens: Worker id -> tokens of warm-up requests that it had already.
        failed: Worker id -> requests of warm-up that it did not answer; empty id = no worker.
        hit_tokens: Worker id -> tokens of clients' prompts found in what was warmed there.
        keep_runs: (pool, why) -> times a worker's cache was filled again by itself.
        keep_s: Pool -> seconds that took.
    """

    def __init__(self) -> None:
        self.computed_tokens: Counter[str] = Counter()
        self.cached_tokens: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.hit_tokens: Counter[str] = Counter()
        self.keep_runs: Counter[tuple[str, str]] = Counter()
        self.keep_s: dict[str, float] = {}

    def forget_worker(self, worker_id: str) -> None:
        """Drop the series of a worker that left for good."""
        for counts in (self.computed_tokens, self.cached_tokens, self.failed, self.hit_tokens):
            counts.pop(worker_id, None)


class WarmCollector(Collector):
    """Yields ``warmlane_warm_*``.

    Args:
        counts: The sums.
        num_warm: Worker id -> documents and prefixes that were warmed there and are held still.
        stored: Tenant-less totals of stored prompts: entries and bytes.
    """

    def __init__(
        self,
        counts: WarmCounts,
        num_warm: Callable[[], dict[str, int]],
        stored: Callable[[], tuple[int, int]],
    ) -> None:
        self._counts = counts
        self._num_warm = num_warm
        self._stored = stored

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: the names are used nowhere else."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        counts = self._counts
        # From 0 on: what a counter is born with is in no rate.
        known = dict.fromkeys((*counts.computed_tokens, *counts.cached_tokens), 0)
        yield _by_worker("computed_tokens", "Tokens computed for warm-up", counts.computed_tokens)
        yield _by_worker(
            "cached_tokens", "Tokens of warm-up requests that were there", counts.cached_tokens
        )
        yield _by_worker("failed", "Warm-up requests that came to nothing", known | counts.failed)
        yield _by_worker(
            "hit_tokens",
            "Tokens of clients' prompts found in what was warmed; against those computed for it "
            "they say whether it was worth it",
            known | counts.hit_tokens,
        )
        warm = GaugeMetricFamily(
            "warmlane_warm_documents", "Documents and prefixes warmed and still held",
            labels=("worker",),
        )  # fmt: skip
        for worker, number in self._num_warm().items():
            warm.add_metric((worker,), number)
        runs = CounterMetricFamily(
            "warmlane_warm_keep_runs", "Times a worker's cache was filled again",
            labels=("pool", "why"),
        )  # fmt: skip
        for (pool, why), number in counts.keep_runs.items():
            runs.add_metric((pool, why), number)
        seconds = CounterMetricFamily(
            "warmlane_warm_keep_seconds", "Time that took", labels=("pool",)
        )
        for pool, passed_s in counts.keep_s.items():
            seconds.add_metric((pool,), passed_s)
        num_entries, num_bytes = self._stored()
        stored = GaugeMetricFamily("warmlane_warm_stored_prompts", "Prompts kept to be warmed")
        stored.add_metric((), num_entries)
        size = GaugeMetricFamily("warmlane_warm_stored_bytes", "Memory of them")
        size.add_metric((), num_bytes)
        yield from (warm, runs, seconds, stored, size)


def _by_worker(name: str, text: str, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"warmlane_warm_{name}", text, labels=("worker",))
    for worker, number in values.items():
        family.add_metric((worker,), number)
    return family
