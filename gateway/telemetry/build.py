"""Which version runs, as a metric."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric


def installed_version() -> str:
    """Return the version of the installed package; ``unknown`` where it runs from a folder."""
    try:
        return version("warmlane")
    except PackageNotFoundError:
        return "unknown"


class BuildCollector(Collector):
    """Yields ``warmlane_build_info``."""

    def __init__(self) -> None:
        self._version = installed_version()

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: the name is used nowhere else."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the family."""
        family = GaugeMetricFamily(
            "warmlane_build_info", "1, labelled with the version that runs", labels=("version",)
        )
        family.add_metric((self._version,), 1)
        yield family
