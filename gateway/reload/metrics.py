"""How reloading goes, read at scrape time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from gateway.reload.reloader import Reloader

FAILURES = "warmlane_config_reload_failures"
FAILURES_HELP = "Times that a new configuration could not be used"
SUCCESS = "warmlane_config_last_reload_success"
SUCCESS_HELP = "Whether the configuration that was read last holds"


class ReloadCollector(Collector):
    """Yields ``warmlane_config_*``."""

    def __init__(self, reloader: Reloader) -> None:
        self._reloader = reloader

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: names here are used nowhere else."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        yield CounterMetricFamily(FAILURES, FAILURES_HELP, value=self._reloader.num_failures)
        yield GaugeMetricFamily(SUCCESS, SUCCESS_HELP, value=self._reloader.is_last_good)


def exposition(reloader: Reloader) -> Iterator[str]:
    """Yield the same as text, for a process that has no registry."""
    yield f"# HELP {FAILURES}_total {FAILURES_HELP}"
    yield f"# TYPE {FAILURES}_total counter"
    yield f"{FAILURES}_total {reloader.num_failures}"
    yield f"# HELP {SUCCESS} {SUCCESS_HELP}"
    yield f"# TYPE {SUCCESS} gauge"
    yield f"{SUCCESS} {int(reloader.is_last_good)}"
