"""Learned constants, kept beyond a process: a new gateway prices workers as the last ones did."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from gateway.routing.learner import Learner, OutputLength
from prefix_index.replica.shared_map import SharedMap
from prefix_index.replica.tasks import run_together

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gateway.routing.pool import Pool, Worker
    from prefix_index.replica.link import Link

# Constants move by a few percent a minute once they are found.
_SAVE_EVERY_S: Final = 10.0
# Workers and pools of a large fleet; the least recently written go first.
_MAX_ENTRIES: Final = 4096
# A worker that never existed here: constants are by pool and worker, completion lengths by pool.
_OF_THE_POOL: Final = ""


class SharedConstants:
    """What was learned of each worker and pool, in Redis; event loop only.

    A worker that this process has measured itself keeps its own constants. One that it has not
    takes those that come, at the start or from another gateway.

    Args:
        pools: Their workers' learners are read, and replaced where nothing was learned.
        link: Connection.

    Attributes:
        decode_errors: Shared constants that are none.
    """

    def __init__(self, pools: Sequence[Pool], link: Link) -> None:
        self.decode_errors = 0
        self._pools = {pool.name: pool for pool in pools}
        self._map = SharedMap(
            link, "constants", max_entries=_MAX_ENTRIES, first_wins=False, on_entry=self._heard
        )
        self._sent: dict[bytes, bytes] = {}
        # Heard of workers that this process does not have yet.
        self._heard_of: dict[bytes, bytes] = {}

    async def run(self) -> None:
        """Save and take over until cancelled."""
        await run_together(self._map.run(), self._save())

    def save(self) -> None:
        """Send what has changed since the last time, and give new workers what is known of them."""
        for key, worker in self._workers():
            if worker.learner.model is None:
                known = self._heard_of.get(key)
                if known is not None:
                    self._take(worker, known)
            else:
                self._put(key, worker.learner.to_json())
        for pool in self._pools.values():
            if pool.output_length.has_learned:
                self._put(_key(pool.name, _OF_THE_POOL), pool.output_length.to_json())

    async def _save(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_EVERY_S)
            self.save()

    def _put(self, key: bytes, value: bytes) -> None:
        if self._sent.get(key) != value:
            self._sent[key] = value
            self._map.put(key, value)

    def _heard(self, key: bytes, value: bytes) -> None:
        name, _, worker_id = key.decode("utf-8", "replace").partition("\0")
        pool = self._pools.get(name)
        if pool is None:
            return
        if worker_id == _OF_THE_POOL:
            if not pool.output_length.has_learned:
                self._take_length(pool, value)
            return
        if len(self._heard_of) < _MAX_ENTRIES or key in self._heard_of:
            self._heard_of[key] = value
        worker = pool.workers.get(worker_id)
        if worker is not None and worker.learner.model is None:
            self._take(worker, value)

    def _take(self, worker: Worker, value: bytes) -> None:
        try:
            worker.learner = Learner.from_json(value)
        except ValueError:
            self.decode_errors += 1

    def _take_length(self, pool: Pool, value: bytes) -> None:
        try:
            pool.output_length = OutputLength.from_json(value)
        except ValueError:
            self.decode_errors += 1

    def _workers(self) -> Iterator[tuple[bytes, Worker]]:
        for pool in self._pools.values():
            for worker in pool.workers.values():
                yield _key(pool.name, worker.id), worker


def _key(pool: str, worker_id: str) -> bytes:
    return f"{pool}\0{worker_id}".encode()
