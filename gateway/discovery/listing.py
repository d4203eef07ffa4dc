"""What one source of workers says: its last whole answer, and how asking it goes."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import structlog
import xxhash

from gateway.config import WorkerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


# Of a worker's id, as the configuration takes it.
MAX_ID_CHARS = 64
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._:-]")

log = structlog.get_logger("warmlane")


@dataclass(frozen=True, slots=True)
class Found:
    """One worker that a source knows.

    Attributes:
        worker: Id and addresses.
        pool: Pool that the source names for it; empty = none in particular.
        model: Model that the source says it serves; empty = it does not say.
        is_ready: Whether it is to get new requests; one that is not ends those it has.
    """

    worker: WorkerConfig
    pool: str = ""
    model: str = ""
    is_ready: bool = True


class Source(Protocol):
    """Finds workers."""

    async def run(self, listing: Listing) -> None:
        """Tell ``listing`` what there is, again whenever it changed, until cancelled.

        Raises:
            Exception: For whatever is wrong with the source; it is run again after a pause.
        """


class Listing:
    """One source's answers; used from the event loop only.

    Args:
        pool: Name of the pool whose ``discovery`` it is.
        on_change: Called when there is another answer.
        clock_unix: Seconds since 1970.

    Attributes:
        found: The last answer; None before the first one.
        num_failures: Times it could not be asked, or its answer could not be used.
        succeeded_unix_s: When it answered last; None = never.
        bad: What of the last answer is no worker -> why not.
    """

    def __init__(
        self,
        pool: str,
        on_change: Callable[[], None],
        *,
        clock_unix: Callable[[], float] = time.time,
    ) -> None:
        self.pool = pool
        self.found: tuple[Found, ...] | None = None
        self.num_failures = 0
        self.succeeded_unix_s: float | None = None
        self.bad: dict[str, str] = {}
        self._on_change = on_change
        self._clock_unix = clock_unix
        self._said = ""

    @property
    def is_failing(self) -> bool:
        """Whether there was no usable answer when it was asked last."""
        return bool(self._said)

    def told(self, found: Sequence[Found], bad: dict[str, str] | None = None) -> None:
        """Take a whole answer.

        Args:
            found: All workers there are.
            bad: What looks like a worker and cannot be one -> why.
        """
        if self._said:
            log.info("discovery_works_again", pool=self.pool)
            self._said = ""
        self.succeeded_unix_s = self._clock_unix()
        if not found and not bad and self.found != ():
            # Nothing failed, and yet it is what a typing error in a name or label looks like.
            log.warning("discovery_found_nobody", pool=self.pool)
        self._use(tuple(found), bad or {})

    def failed(self, reason: str) -> None:
        """Take note that there is no answer; what was found before stays. One line per reason."""
        self.num_failures += 1
        if reason != self._said:
            self._said = reason
            kept = "none yet" if self.found is None else len(self.found)
            log.warning("discovery_failed", pool=self.pool, reason=reason, workers_kept=kept)

    def given_up(self, bad: dict[str, str]) -> None:
        """Forget all workers, since there has been no answer for too long; it is failing still.

        Args:
            bad: What is not found any more -> why.
        """
        self._use((), bad)

    def _use(self, found: tuple[Found, ...], bad: dict[str, str]) -> None:
        self.bad = bad
        if found != self.found:
            self.found = found
            self._on_change()


def id_from(name: str) -> str:
    """Return a worker's id from a name that is its own: the same one for ever.

    Names that are too long for an id, or have other signs, keep their beginning and get a hash.
    """
    plain = _NOT_IN_IDS.sub("-", name)
    if plain == name and len(name) <= MAX_ID_CHARS:
        return name
    digest = xxhash.xxh3_64_hexdigest(name.encode("utf-8", "surrogatepass"))
    return f"{plain[: MAX_ID_CHARS - len(digest) - 1]}-{digest}"


def host_url(scheme: str, host: str, port: int) -> str:
    """Return the URL of a host and port; an IPv6 address gets its brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
