"""Who reads which worker's events: one lease per worker, renewed each second, decided in Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prefix_index.replica.codec import Head, SharedValueError, entry_order, unpack_head
from prefix_index.replica.scripts import RELEASE, REMOVE, TICK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prefix_index.replica.link import Link

LEASE_S: Final = 3.0
"""How long a lease lasts without renewal: a lost holder is replaced within it and one tick."""

TICK_S: Final = 1.0
# What nobody writes to or renews for this long describes a cache that is long gone.
KEPT_S: Final = 3600.0
INCOMPLETE: Final = "not as many blocks as were published"
"""The fault of a state that lost or got fields: a server short of memory drops whole keys."""

# A script call stands in everybody's way; this many workers take it half a millisecond.
_WORKERS_PER_CALL: Final = 64
# Deltas kept for gateways that fall behind: a quarter of a minute at full rate, 110 MB at worst.
STREAM_DELTAS: Final = 8192


class Shared(NamedTuple):
    """What Redis says of one worker.

    Attributes:
        lease: Value of the lease key, empty if nobody has it.
        is_ours: Whether this process has it.
        id: The last delta's id, empty if nothing is there.
        head: Where that delta leaves the worker's events.
        block_size: Tokens per block of what is there.
        num_blocks: Blocks that are there.
        fault: Why what is there cannot be used, empty if it can.
    """

    lease: bytes
    is_ours: bool
    id: bytes
    head: Head
    block_size: int
    num_blocks: int
    fault: str = ""

    @property
    def holder(self) -> str:
        """Name of the process that has the lease."""
        return self.lease.partition(b" ")[0].decode("utf-8", "replace")

    @property
    def generation(self) -> int:
        """Counts leases of the pool; 0 without one."""
        number = self.lease.partition(b" ")[2]
        return int(number) if number.isdigit() else 0


class Leases:
    """The leases of one pool's workers.

    Args:
        link: Connection.
        pool: Name of the pool.
        holder: Name of this process, different from all others' and without blanks.
    """

    def __init__(self, link: Link, pool: str, holder: str) -> None:
        self.holder = holder
        self._link = link
        self._pool = pool
        # Made once: a look-up needs them all.
        self._keys: dict[str, list[str]] = {}

    def keys(self, worker: str) -> list[str]:
        """Return the keys of a worker: lease, meta, state."""
        keys = self._keys.get(worker)
        if keys is None:
            kinds = ("lease", "meta", "state")
            keys = [self._link.key(self._pool, kind, worker) for kind in kinds]
            self._keys[worker] = keys
        return keys

    def forget(self, worker: str) -> None:
        """A worker is no more."""
        self._keys.pop(worker, None)

    @property
    def stream(self) -> str:
        """Key of the pool's stream of deltas."""
        return self._link.key(self._pool, "deltas")

    async def tick(self, wanted: Mapping[str, bool]) -> dict[str, Shared]:
        """Renew our leases, take free ones that are wanted, and return what is there.

        Raises:
            LINK_ERRORS: If Redis does not do it.
        """
        workers = list(wanted)
        found: dict[str, Shared] = {}
        for start in range(0, len(workers), _WORKERS_PER_CALL):
            part = workers[start : start + _WORKERS_PER_CALL]
            keys = [self._link.key(self._pool, "generations"), self.stream]
            for worker in part:
                keys += self.keys(worker)
            args: list[str | bytes | int] = [self.holder, _ms(LEASE_S), _ms(KEPT_S)]
            args += [int(wanted[worker]) for worker in part]
            answers = await TICK.run(self._link.client, keys, args)
            for worker, answer in zip(part, answers, strict=True):
                found[worker] = self._shared(answer)
        return found

    async def release(self, workers: Iterable[str]) -> None:
        """Give up our leases at once.

        Raises:
            LINK_ERRORS: If Redis does not do it.
        """
        keys = [self.keys(worker)[0] for worker in workers]
        if keys:
            await RELEASE.run(self._link.client, keys, [self.holder])

    async def remove(self, worker: str, head: bytes) -> None:
        """Delete everything about a worker, unless another process reads its events.

        Raises:
            LINK_ERRORS: If Redis does not do it.
        """
        keys = [*self.keys(worker), self.stream]
        await REMOVE.run(self._link.client, keys, [self.holder, worker, head, STREAM_DELTAS])

    def _shared(self, answer: list[Any]) -> Shared:
        lease, entry_id, head, block_size, size, num_blocks = answer
        is_ours = lease.startswith(self.holder.encode() + b" ")
        if not entry_id:
            return Shared(lease, is_ours, b"", Head(), 0, 0, "no meta" if num_blocks else "")
        try:
            entry_order(entry_id)
            known = unpack_head(head)
            if not block_size.isdigit():
                raise SharedValueError("no block size")
        except SharedValueError as error:
            return Shared(lease, is_ours, b"", Head(), 0, num_blocks, str(error))
        fault = "" if size == b"%d" % num_blocks else INCOMPLETE
        return Shared(lease, is_ours, entry_id, known, int(block_size), num_blocks, fault)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
