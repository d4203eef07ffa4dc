"""Builds the gateway's own metrics in one registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram


class Factory:
    """Makes counters and histograms; names are written without ``_total``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Make a counter."""
        return Counter(name, text, labels, registry=self._registry)

    def histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        """Make a histogram."""
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)
