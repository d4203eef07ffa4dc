"""Metric names of the gateway, all of them, and the one call that records a finished request.

Labels are bounded: pools, workers and models come from the configuration, outcomes and reasons are
enums. Every prediction is recorded beside its observation. A worker's series leave with it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector

from gateway.telemetry.build import BuildCollector
from gateway.telemetry.by_hit import ByHit
from gateway.telemetry.choices import Choices
from gateway.telemetry.exposition import write
from gateway.telemetry.factory import Count, Distribution, Factory
from gateway.telemetry.lag import LoopLag
from gateway.telemetry.observed import FLEET, Observed
from gateway.telemetry.slices import in_slices
from gateway.telemetry.window import bucket_of, slot_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from prometheus_client.registry import Collector

    from gateway.telemetry.record import RequestRecord

# OpenTelemetry's GenAI buckets, longer at the end for prefills of 100k tokens and queues before
# them, up to the longest that a first byte is waited for (``server.limits.first_byte_s``).
TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0),
)
# A decision takes tens of microseconds; tokenizing a long new prompt takes tens of milliseconds.
ROUTE_BUCKETS_S = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.5)
# Up to the longest that a request may take (``server.limits.request_s``).
DURATION_BUCKETS_S = (
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
# OpenTelemetry's GenAI buckets, finer at the beginning: small models take a millisecond a token.
OUTPUT_TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    2.5,
)
# How much of the mean request's length one more request counts: about the last hundred of a pool.
LENGTH_ALPHA = 0.01


class Telemetry:
    """Owns the registry; called from the event loop only.

    Args:
        clock: Monotonic seconds.
        outcomes: Of attempts at workers; each is counted from 0 as soon as a worker is known, since
            the first failure of a series that begins with it would be no increase.

    Attributes:
        registry: All families of the process.
        fleet: What all workers did together.
        workers: Worker id -> what it did.
        overflows: Label -> times that a value of it had no series of its own.
        request_tokens: Pool -> tokens of a request there, prompt and completion, a running mean.
        lag: Measures how late the event loop is; whoever owns the loop runs it.
        settle: Has finished requests that wait recorded; whoever reads calls it first. Set by who
            lets them wait.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, outcomes: Collection[str] = ()
    ) -> None:
        self.registry = CollectorRegistry()
        self.fleet = Observed()
        self.workers: dict[str, Observed] = {}
        self.request_tokens: dict[str, float] = {}
        self.settle: Callable[[], None] = lambda: None
        self._clock = clock
        self._outcomes = outcomes
        self._bound: dict[tuple[str, ...], _RequestSeries] = {}
        # Only what the process itself says; nothing is read before somebody scrapes.
        ProcessCollector(registry=self.registry)
        self.registry.register(BuildCollector())
        self._make = make = Factory(self.registry)
        self.overflows = make.overflows
        self.lag = LoopLag(make)
        self._requests = make.counter(
            "warmlane_requests", "Finished requests", "pool", "worker", "outcome"
        )
        self._decisions = make.counter(
            "warmlane_routing_decisions", "Routing decisions by reason", "pool", "reason"
        )
        self._attempts = make.counter(
            "warmlane_retries", "Attempts after the first one", "pool", "worker"
        )
        self._prompt = make.counter("warmlane_prompt_tokens", "Prompt tokens", "pool", "worker")
        self._predicted = make.counter(
            "warmlane_predicted_hit_tokens",
            "Prompt tokens the decision expected to find cached",
            *("pool", "worker"),
        )
        self._observed = make.counter(
            "warmlane_observed_hit_tokens",
            "Prompt tokens the worker reported as cached",
            *("pool", "worker"),
        )
        self._computed = make.counter(
            "warmlane_computed_prompt_tokens",
            "Prompt tokens the worker reported as not cached, which it had to compute",
            *("pool", "worker"),
        )
        self._error = make.counter(
            "warmlane_hit_prediction_error_tokens",
            "Absolute difference of predicted and observed hit tokens, where both are known",
            *("pool", "worker"),
        )
        self._completion = make.counter(
            "warmlane_completion_tokens", "Completion tokens", "pool", "worker"
        )
        self._ttft = make.histogram(
            "warmlane_ttft_seconds", "Time to first token", TTFT_BUCKETS_S, "pool", "worker"
        )
        self._predicted_ttft = make.histogram(
            "warmlane_predicted_ttft_seconds",
            "Time to first token the decision expected",
            TTFT_BUCKETS_S,
            *("pool", "worker"),
        )
        self._duration = make.histogram(
            "warmlane_request_duration_seconds",
            "From the request's head to the last byte of its answer",
            DURATION_BUCKETS_S,
            *("pool", "worker"),
        )
        self._output_token = make.histogram(
            "warmlane_output_token_seconds",
            "Mean time between two tokens of a streamed answer",
            OUTPUT_TOKEN_BUCKETS_S,
            *("pool", "worker"),
        )
        self._route = make.histogram(
            "warmlane_route_seconds",
            "Reading the prompt and choosing a worker",
            ROUTE_BUCKETS_S,
            "pool",
        )
        self._worker = make.label("worker")
        self._choices = Choices(make)
        self._by_hit = ByHit(make, TTFT_BUCKETS_S)

    def observe(self, record: RequestRecord) -> None:
        """Record one finished request."""
        worker = self.workers.get(record.worker)
        if worker is None and record.worker:
            # Beyond what labels may have, all share one.
            worker = self.workers.setdefault(self._worker.of(record.worker), Observed())
        # Answers that are not streamed, of workers that report no cached tokens, show neither.
        if record.ttft_s is not None or record.observed_hit_tokens is not None:
            number = slot_of(self._clock())
            bucket = 0 if record.ttft_s is None else bucket_of(record.ttft_s)
            self.fleet.add(record, number, bucket)
            if worker is not None:
                worker.add(record, number, bucket)
        if record.prompt_tokens and record.worker:
            self._count_length(record)
        self._requests_of(record).add(record)
        self._choices.add(record)
        self._by_hit.add(record)

    def forget_worker(self, worker: str) -> None:
        """Remove the series of a worker that left."""
        self.workers.pop(worker, None)
        self._worker.forget(worker)
        for key in [key for key in self._bound if key[1] == worker]:
            del self._bound[key]
        for metric in (self._requests, self._attempts, self._prompt, self._predicted):
            metric.remove_by_labels({"worker": worker})
        for metric in (self._observed, self._computed, self._error, self._completion):
            metric.remove_by_labels({"worker": worker})
        for histogram in (
            self._ttft,
            self._predicted_ttft,
            self._duration,
            self._output_token,
        ):
            histogram.remove_by_labels({"worker": worker})
        self._choices.forget_worker(worker)

    def render(self, *, open_metrics: bool = False) -> bytes:
        """Return the exposition text, in one go; for a live gateway see ``render_in_slices``."""
        self.settle()
        return "".join(write(self.registry.collect(), open_metrics=open_metrics)).encode()

    async def render_in_slices(self, *, open_metrics: bool = False) -> bytes:
        """Return the exposition text, and let others run in between."""
        self.settle()
        pieces = await in_slices(write(self.registry.collect(), open_metrics=open_metrics))
        return "".join(pieces).encode()

    def scopes(self) -> dict[tuple[str, str], Observed]:
        """Return what was observed by the labels of the contract's bare names."""
        workers = {("worker", worker): observed for worker, observed in self.workers.items()}
        return {FLEET: self.fleet, **workers}

    def now_s(self) -> float:
        """Return the time by its clock, monotonic seconds."""
        return self._clock()

    def register(self, collector: Collector) -> None:
        """Add a collector that reads live state at scrape time."""
        self.registry.register(collector)

    def _count_length(self, record: RequestRecord) -> None:
        completion = record.completion_tokens or record.counted_tokens or 0
        length = record.prompt_tokens + completion
        mean = self.request_tokens.get(record.pool, float(length))
        self.request_tokens[record.pool] = mean + LENGTH_ALPHA * (length - mean)

    def _requests_of(self, record: RequestRecord) -> _RequestSeries:
        key = (record.pool, record.worker, record.outcome, record.reason)
        series = self._bound.get(key)
        if series is None:
            labels = (record.pool, record.worker)
            if record.worker:
                for outcome in self._outcomes:
                    self._requests.labels(*labels, outcome)
            series = self._bound[key] = _RequestSeries(
                finished=self._requests.labels(*labels, record.outcome),
                decided=self._decisions.labels(record.pool, record.reason or "none"),
                retries=self._attempts.labels(*labels),
                prompt=self._prompt.labels(*labels),
                predicted=self._predicted.labels(*labels),
                observed=self._observed.labels(*labels),
                computed=self._computed.labels(*labels),
                error=self._error.labels(*labels),
                completion=self._completion.labels(*labels),
                ttft=self._ttft.labels(*labels),
                predicted_ttft=self._predicted_ttft.labels(*labels),
                duration=self._duration.labels(*labels),
                output_token=self._output_token.labels(*labels),
                route=self._route.labels(record.pool),
            )
        return series


@dataclass(slots=True)
class _RequestSeries:
    """The children one kind of request counts into, looked up once."""

    finished: Count
    decided: Count
    retries: Count
    prompt: Count
    predicted: Count
    observed: Count
    computed: Count
    error: Count
    completion: Count
    ttft: Distribution
    predicted_ttft: Distribution
    duration: Distribution
    output_token: Distribution
    route: Distribution

    def add(self, record: RequestRecord) -> None:
        self.finished.inc()
        self.duration.observe(record.duration_s, record.trace_id)
        if not record.worker:
            return
        self.decided.inc()
        self.route.observe(record.route_s)
        self.prompt.inc(record.prompt_tokens or 0)
        self.predicted.inc(record.predicted_hit_tokens)
        if record.attempts > 1:
            self.retries.inc(record.attempts - 1)
        if record.observed_hit_tokens is not None:
            self.observed.inc(record.observed_hit_tokens)
            self.computed.inc(max(0, record.prompt_tokens - record.observed_hit_tokens))
            self.error.inc(abs(record.observed_hit_tokens - record.predicted_hit_tokens))
        if record.completion_tokens:
            self.completion.inc(record.completion_tokens)
        if record.ttft_s is not None:
            self.ttft.observe(record.ttft_s, record.trace_id)
            if record.predicted_ttft_s is not None:
                self.predicted_ttft.observe(record.predicted_ttft_s)
            num_tokens = record.completion_tokens or record.counted_tokens or 0
            if num_tokens > 1:
                between_s = (record.duration_s - record.ttft_s) / (num_tokens - 1)
                self.output_token.observe(between_s)
