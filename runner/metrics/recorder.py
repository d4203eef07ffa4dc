"""Prometheus text of one runner, in three families of names.

``vllm:`` names are what dashboards and routers scrape. The bare names are fixed by the project's
contract for gateways and runners alike; a bare sample whose value nobody knows is absent, never 0,
so a runner without lower tiers has no offload latency and no restore stall. ``warmlane_runner_*``
are their typed twins, which is what alerts should use; ``warmlane_tier_*`` and ``warmlane_peer_*``
are of the lower tiers and of other runners alone.

Source: vLLM 0.32 ``/metrics`` (names, types, labels, buckets).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from runner.metrics.engine_figures import EngineFigures
from runner.metrics.identity import Identity, typed_labels
from runner.metrics.peer_figures import PeerFigures
from runner.metrics.transfers import TransferMeter
from runner.metrics.window import First, Window, WindowFigures
from runner.types import FinishReason, HitSource

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from runner.metrics.peer_figures import Pulled, Served
    from runner.types import EngineStats

# vLLM's buckets, so that its dashboards show the runner without change.
TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)

TtftSource: TypeAlias = HitSource | Literal["cold"]
"""The farthest place a prompt's KV came from; ``cold`` if none of it was cached."""


class RunnerMetrics:
    """Owns the registry; any thread may call any method.

    Args:
        model: Served model name.
        worker: How this runner is told from others, ``host:port``.
        stats: Reads the engine's figures.
        transfers: Where the tiers report to; None without lower tiers.
        pulls: What was pulled from each peer; None if there are none.
        served: What was served to peers; None if nothing is.
        clock: Monotonic seconds.
        wall_clock: Unix seconds; read once, for the start time that marks an epoch.

    Attributes:
        registry: All families.
    """

    def __init__(
        self,
        *,
        model: str,
        worker: str,
        stats: Callable[[], EngineStats],
        transfers: TransferMeter | None = None,
        pulls: Callable[[], Mapping[str, Pulled]] | None = None,
        served: Callable[[], Served] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.registry = CollectorRegistry()
        self._labels = typed_labels(model)
        self._firsts: Window[First] = Window(clock)
        if transfers is None:
            transfers = TransferMeter(model, clock)
        self.registry.register(transfers.times)
        finished = self._counter(
            "vllm:request_success", "Finished samples by reason.", "finished_reason"
        )
        self._finished = {
            reason: finished.labels(**self._labels, finished_reason=reason)
            for reason in get_args(FinishReason)
        }
        name, text = "time_to_first_token_seconds", "Time to first token."
        self._ttft = self._histogram(f"vllm:{name}", text, TTFT_BUCKETS_S).labels(**self._labels)
        self._ttft_by_source = self._histogram(
            "warmlane_runner_ttft_seconds",
            f"{text[:-1]} by source of KV.",
            TTFT_BUCKETS_S,
            "source",
        )
        identity = Identity(self._labels, {"scope": "worker", "worker": worker})
        for collector in (
            EngineFigures(identity, stats, transfers, wall_clock()),
            WindowFigures(identity, self._firsts, transfers.recent),
            PeerFigures(pulls, served),
        ):
            self.registry.register(collector)

    def first_token(
        self,
        ttft_s: float,
        prompt_tokens: int,
        cached_tokens: int,
        source: TtftSource | None = None,
    ) -> None:
        """Note the first token of a prompt.

        Args:
            ttft_s: Since the request arrived.
            prompt_tokens: Of the prompt.
            cached_tokens: How many of them had not to be computed.
            source: Where from; None if that is known only of the pool.
        """
        place = source or ("gpu" if cached_tokens else "cold")
        self._ttft.observe(ttft_s)
        self._ttft_by_source.labels(**self._labels, source=place).observe(ttft_s)
        self._firsts.add(First(ttft_s, prompt_tokens, cached_tokens))

    def finished(self, reason: FinishReason) -> None:
        """Note the end of one sample."""
        self._finished[reason].inc()

    def render(self) -> bytes:
        """Return the exposition text (format 0.0.4)."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, [*self._labels, *labels], registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(
            name, text, [*self._labels, *labels], buckets=buckets, registry=self.registry
        )
