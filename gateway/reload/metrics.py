"""How reloading goes, read at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from gateway.reload.reloader import Reloader


class ReloadCollector(Collector):
    """Yields ``warmlane_config_*``."""

    def __init__(self, reloader: Reloader) -> None:
        self._reloader = reloader

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: names here are used nowhere else."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        yield CounterMetricFamily(
            "warmlane_config_reload_failures",
            "Times that a new configuration could not be used",
            value=self._reloader.num_failures,
        )
        yield GaugeMetricFamily(
            "warmlane_config_last_reload_success",
            "Whether the configuration that was read last holds",
            value=self._reloader.is_last_good,
        )
        yield GaugeMetricFamily(
            "warmlane_config_waiting_keys",
            "Keys of the configuration whose new value waits for a restart",
            value=len(self._reloader.kept),
        )
