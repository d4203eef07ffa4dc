"""Families of KV pulled from other runners and served to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from runner.metrics.identity import fill_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.core import Metric


class Pulled(Protocol):
    """What was pulled from one peer; all of it only grows."""

    @property
    def bytes(self) -> int:
        """Bytes that came."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens whose KV came."""
        ...

    @property
    def seconds(self) -> float:
        """Time of all pulls."""
        ...

    @property
    def failed(self) -> int:
        """Pulls that ended early."""
        ...


class Served(Protocol):
    """What was served to peers; all of it only grows."""

    @property
    def served_blocks(self) -> int:
        """Blocks handed out."""
        ...

    @property
    def served_bytes(self) -> int:
        """Bytes handed out."""
        ...

    @property
    def refused(self) -> int:
        """Requests refused since too many were being served."""
        ...

    @property
    def cut_short(self) -> int:
        """Answers ended early: reader too slow, lease over."""
        ...


@dataclass(frozen=True, slots=True)
class PeerFigures(Collector):
    """Read at scrape time.

    Attributes:
        pulls: What was pulled, by the peer's configured address; None if nothing can be.
        served: What was served; None if nothing is.
    """

    pulls: Callable[[], Mapping[str, Pulled]] | None
    served: Callable[[], Served] | None

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not ask anybody."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the families of what this runner does."""
        if self.pulls is not None:
            yield from _pulled(self.pulls())
        if self.served is not None:
            yield from _served(self.served())


def _pulled(pulls: Mapping[str, Pulled]) -> Iterator[Metric]:
    for name, text, values in (
        ("pull_bytes", "Bytes pulled.", [pull.bytes for pull in pulls.values()]),
        ("pull_tokens", "Tokens whose KV was pulled.", [pull.tokens for pull in pulls.values()]),
        ("pull_seconds", "Time of all pulls.", [pull.seconds for pull in pulls.values()]),
        ("pulls_failed", "Pulls that ended early.", [pull.failed for pull in pulls.values()]),
    ):
        family = CounterMetricFamily(f"warmlane_peer_{name}", text, labels=["source"])
        yield from fill_rows(
            family, [], [((url,), value) for url, value in zip(pulls, values, strict=True)]
        )


def _served(served: Served) -> Iterator[Metric]:
    for name, text, value in (
        ("served_blocks", "Blocks handed to other runners.", served.served_blocks),
        ("served_bytes", "Bytes handed to other runners.", served.served_bytes),
        ("refused", "Requests of other runners refused as too many.", served.refused),
        ("cut_short", "Answers to other runners ended early.", served.cut_short),
    ):
        yield CounterMetricFamily(f"warmlane_peer_{name}", text, value=value)
