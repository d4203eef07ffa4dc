"""The remote tier: blocks as values in a Redis or Valkey that several runners share.

A block's key is ``warmlane:kv:v1:<namespace, 16 hex>:<block key, hex>``, its value the block as it
travels (``record.py``). A payload of more than 1 MiB is split (``...:1``, ``...:2``): Redis serves
one command at a time, and a long one holds up everybody. Values are read by single pipelined GETs
for the same reason. Every key expires, so the server may bound its memory by any policy it has.

Nothing here raises for a fault of the server: it is a miss, within the deadline. A block found
damaged is deleted, so that the next runner that computes it stores it anew.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from runner.tiers.connections import MAX_CONNECTIONS, Connections, Pause
from runner.tiers.record import encode_head, head_bytes, is_sound
from runner.tiers.resp import OversizedError, ReplyError, parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from runner.kvkeys import KvKey
    from runner.tiers.resp import Argument, RespClient
    from runner.tiers.types import Deliver, Outcome, Place

SCHEMA = b"warmlane:kv:v1"
MAX_VALUE_BYTES = 1024 * 1024
# A document read once a day stays; what nobody reads leaves even where the server never evicts.
TTL_S = 24 * 3600
# Asked for and not yet read, all connections together: what is on the way on a 25 Gbit/s link
# with a round trip of 2 ms is 6 MB, for each of them.
BUDGET_BYTES = 32 * 1024 * 1024
# Look-ups of one go: their replies fit into one buffer of the connection.
EXISTS_BATCH = 512
# A write may take so long, and longer by its size at a rate that no usable server falls below.
WRITE_S, MIN_WRITE_BYTES_PER_S = 2.0, 10e6
# Deleting what was damaged is a favour to others; nobody waits for it longer.
DELETE_S = 0.5


class RemoteStore:
    """``BlockStore`` over a shared server; blocking calls from several threads at once.

    Attributes:
        block_bytes: Bytes of a block.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: KvKey,
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect to nobody yet.

        Args:
            url: See ``resp.parse_url``.
            namespace: Of everything that makes the bytes usable.
            block_bytes: Bytes of a block.
            clock: Of all deadlines.

        Raises:
            ValueError: If the URL is not understood.
        """
        self.block_bytes = block_bytes
        self.namespace = namespace
        self._clock = clock
        self._prefix = b"%s:%s:" % (SCHEMA, namespace[:8].hex().encode())
        self._num_parts = max(1, -(-block_bytes // MAX_VALUE_BYTES))
        self._connections = Connections(parse_url(url), clock)
        # Out of memory or read-only: reads go on meanwhile.
        self._write_pause = Pause(clock)

    @property
    def is_paused(self) -> bool:
        """Whether the server is left alone for a while: it was away, or refused to store."""
        return self._connections.is_paused or self._write_pause.is_on

    def names(self, key: KvKey) -> list[bytes]:
        """Return the server's keys of the parts of a block."""
        name = self._prefix + key.hex().encode()
        return [name, *(b"%s:%d" % (name, part) for part in range(1, self._num_parts))]

    def read(self, wanted: Sequence[Place], deliver: Deliver, deadline_s: float) -> Outcome:
        """Deliver blocks in order; see ``BlockStore.read``."""
        reading = _Reading(self, wanted, deliver, deadline_s)
        try:
            outcome = self._connections.use(reading.run, deadline_s)
        except TimeoutError:
            return "stopped" if self._clock() >= deadline_s else "failed"
        except OversizedError:
            outcome = "damaged"
        except (OSError, ReplyError):
            return "failed"
        if outcome == "damaged":
            self._delete(wanted[reading.num_delivered].record.key)
        return outcome

    def write(self, places: Sequence[Place], payloads: Sequence[memoryview]) -> list[bool]:
        """Store blocks, or prolong the life of those that are there; see ``BlockStore.write``."""
        stored = [False] * len(places)
        if self._write_pause.is_on:
            return stored
        num_bytes = len(places) * self.block_bytes
        deadline_s = self._clock() + WRITE_S + num_bytes / MIN_WRITE_BYTES_PER_S
        names = [self.names(place.record.key) for place in places]

        def work(client: RespClient) -> None:
            prolong = [[(b"EXPIRE", name, b"%d" % TTL_S) for name in part] for part in names]
            try:
                stored[:] = _all_true(client, prolong, deadline_s)
                missing = [at for at, is_there in enumerate(stored) if not is_there]
                for at in missing:
                    client.send(self._sets(places[at], payloads[at], names[at]), deadline_s)
                for at in missing:
                    # A sum, since every reply must be read.
                    num_set = sum(self._is_set(client, deadline_s) for _ in names[at])
                    stored[at] = num_set == len(names[at])
            except ReplyError:
                self._write_pause.failed()

        with contextlib.suppress(OSError, ReplyError):
            self._connections.use(work, deadline_s)
        return stored

    def exists(self, keys: Sequence[KvKey], deadline_s: float) -> list[bool]:
        """Return which blocks are there now; none if the server does not say so in time.

        By the time of a read they may be gone.
        """
        found: list[bool] = []

        def work(client: RespClient) -> None:
            for start in range(0, len(keys), EXISTS_BATCH):
                batch = keys[start : start + EXISTS_BATCH]
                asked = [[(b"EXISTS", name) for name in self.names(key)] for key in batch]
                found.extend(_all_true(client, asked, deadline_s))

        with contextlib.suppress(OSError, ReplyError):
            self._connections.use(work, deadline_s)
        return found + [False] * (len(keys) - len(found))

    def close(self) -> None:
        """Close all connections."""
        self._connections.close()

    def _sets(
        self, place: Place, payload: memoryview, names: Sequence[bytes]
    ) -> list[tuple[Argument, ...]]:
        head = encode_head(self.namespace, place.record, payload)
        ttl = b"%d" % TTL_S
        commands: list[tuple[Argument, ...]] = []
        for part, name in enumerate(names):
            data = payload[part * MAX_VALUE_BYTES : (part + 1) * MAX_VALUE_BYTES]
            commands.append((b"SETEX", name, ttl, data if part else (head, data)))
        return commands

    def _is_set(self, client: RespClient, deadline_s: float) -> bool:
        try:
            client.reply(deadline_s)
        except ReplyError:
            self._write_pause.failed()
            return False
        self._write_pause.succeeded()
        return True

    def _delete(self, key: KvKey) -> None:
        deadline_s = self._clock() + DELETE_S

        def work(client: RespClient) -> None:
            client.send([(b"UNLINK", *self.names(key))], deadline_s)
            client.reply(deadline_s)

        with contextlib.suppress(OSError, ReplyError):
            self._connections.use(work, deadline_s)


class _Reading:
    """One ``read``: asks ahead, within the budget of one connection, and delivers in order."""

    def __init__(
        self, store: RemoteStore, wanted: Sequence[Place], deliver: Deliver, deadline_s: float
    ) -> None:
        self.num_delivered = 0
        self._store = store
        self._wanted = wanted
        self._deliver = deliver
        self._deadline_s = deadline_s

    def run(self, client: RespClient) -> Outcome:
        store, deadline_s = self._store, self._deadline_s
        ahead = max(1, BUDGET_BYTES // MAX_CONNECTIONS // store.block_bytes)
        buffer = memoryview(bytearray())
        num_asked = 0
        for at, place in enumerate(self._wanted):
            if num_asked < (asked := min(at + ahead, len(self._wanted))):
                client.send(list(self._gets(num_asked, asked)), deadline_s)
                num_asked = asked
            record = place.record
            head = head_bytes(len(record.tokens))
            if len(buffer) != head + store.block_bytes:
                # Reused for every block, since a buffer is valid only during its delivery.
                buffer = memoryview(bytearray(head + store.block_bytes))
            outcome = self._receive(client, buffer, head)
            if outcome != "done":
                return outcome
            payload = buffer[head:]
            if not is_sound(buffer[:head], payload, store.namespace, record):
                return "damaged"
            if not self._deliver(at, payload):
                return "stopped"
            self.num_delivered += 1
        return "done"

    def _gets(self, start: int, end: int) -> Iterator[tuple[Argument, ...]]:
        for place in self._wanted[start:end]:
            for name in self._store.names(place.record.key):
                yield b"GET", name

    def _receive(self, client: RespClient, buffer: memoryview, head: int) -> Outcome:
        """Put a block's parts into the buffer; the first one has the head before its bytes."""
        start = 0
        end = min(head + MAX_VALUE_BYTES, len(buffer))
        while start < len(buffer):
            try:
                length = client.reply(self._deadline_s, buffer[start:end])
            except ReplyError as error:
                if error.code != "WRONGTYPE":
                    raise
                return "damaged"
            if length is None:
                return "missing"
            if length != end - start:
                return "damaged"
            start, end = end, min(end + MAX_VALUE_BYTES, len(buffer))
        return "done"


def _all_true(
    client: RespClient, asked: Sequence[Sequence[tuple[Argument, ...]]], deadline_s: float
) -> list[bool]:
    """Send the commands of all blocks; say of each block whether all of its replies are 1."""
    client.send([command for block in asked for command in block], deadline_s)
    # Sums, since every reply must be read.
    return [sum(client.reply(deadline_s) == 1 for _ in block) == len(block) for block in asked]
