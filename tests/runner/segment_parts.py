"""Parts of the segment tests: blocks that prove themselves, a clock, a disk with faults."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runner.kvkeys import block_key, namespace_key, pack_tokens
from runner.tiers.segments.direct_io import Os
from runner.tiers.segments.layout import SegmentLayout
from runner.tiers.segments.store import SegmentStore
from runner.tiers.types import BlockRecord, Outcome, Place

BLOCK_SIZE = 16
# Not a multiple of a page: slots have padding and payloads go through a bounce buffer.
BLOCK_BYTES = 5_000
FACTS = {"model": "tiny", "dtype": "float32", "block_size": BLOCK_SIZE}
NAMESPACE = namespace_key(FACTS)
LAYOUT = SegmentLayout(NAMESPACE, BLOCK_BYTES, BLOCK_SIZE)
# Four segments of eight slots and little more.
CAPACITY_BYTES = 4 * LAYOUT.file_bytes(8) + 8_192


def record(number: int) -> BlockRecord:
    tokens = pack_tokens(range(number, number + BLOCK_SIZE))
    parent = hashlib.sha256(b"parent").digest()
    return BlockRecord(block_key(parent, tokens), parent, tokens, depth=number)


def payload(of: BlockRecord, num_bytes: int = BLOCK_BYTES) -> memoryview:
    """Return the one payload that a block of this key can have."""
    return memoryview(hashlib.shake_128(of.key).digest(num_bytes))


class ManualClock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class FaultyOs(Os):
    """Real system calls, with a look at each before it is made and a limit on what one moves.

    Attributes:
        before: Called with a call's name, its descriptor (or path) and offset; may raise, write
            elsewhere or turn a clock.
        max_bytes: What one read or write moves at most.
        calls: Name, bytes asked for.
    """

    def __init__(self) -> None:
        self.before: Callable[[str, Any, int], None] = lambda name, target, offset: None
        self.max_bytes: int | None = None
        self.free_bytes: int | None = None
        self.calls: list[tuple[str, int]] = []
        self.has_direct_io = True

    def count(self, name: str, at_least: int = 0) -> int:
        return sum(call == name and size >= at_least for call, size in self.calls)

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT and not self.has_direct_io:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        self.before("open", path, 0)
        return super().open(path, flags)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.calls.append(("preadv", sum(buffer.nbytes for buffer in buffers)))
        self.before("preadv", fd, offset)
        return super().preadv(fd, self._cut(buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        views = [memoryview(buffer) for buffer in buffers]
        self.calls.append(("pwritev", sum(view.nbytes for view in views)))
        self.before("pwritev", fd, offset)
        return super().pwritev(fd, self._cut(views), offset)

    def fsync(self, fd: int) -> None:
        self.before("fsync", fd, 0)
        super().fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self.before("rename", source, 0)
        super().rename(source, target)

    def statvfs(self, path: Path) -> os.statvfs_result:
        real = super().statvfs(path)
        if self.free_bytes is None:
            return real
        # A small filesystem: none of it is kept free for others.
        block = 512
        return os.statvfs_result((block, block, 0, 0, self.free_bytes // block, 0, 0, 0, 0, 255))

    def _cut(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        if self.max_bytes is None:
            return list(buffers)
        cut: list[memoryview] = []
        left = self.max_bytes
        for buffer in buffers:
            if left > 0:
                cut.append(buffer[:left])
            left -= buffer.nbytes
        return cut


def nothing(name: str, target: Any, offset: int) -> None:
    """Let every call through."""


class FailAt:
    """Fails the n-th call of a name from now on (and, if told so, all after it)."""

    def __init__(self, name: str, nth: int, code: int, *, forever: bool = False) -> None:
        self.name, self.nth, self.code, self.forever = name, nth, code, forever
        self.seen = 0
        self._lock = threading.Lock()

    def __call__(self, name: str, target: Any, offset: int) -> None:
        if name != self.name:
            return
        with self._lock:
            self.seen += 1
            if self.seen == self.nth or (self.forever and self.seen > self.nth):
                raise OSError(self.code, os.strerror(self.code))


def until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    """Wait for another thread to make something true."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "not reached in time"
        time.sleep(0.002)


def open_store(
    root: Path,
    *,
    clock: Callable[[], float] = time.monotonic,
    capacity_bytes: int = CAPACITY_BYTES,
    block_bytes: int = BLOCK_BYTES,
    files: Os | None = None,
    facts: dict[str, object] | None = None,
) -> tuple[SegmentStore, list[Place]]:
    facts = FACTS if facts is None else facts
    return SegmentStore.open(
        root,
        namespace=namespace_key(facts),
        facts=facts,
        block_bytes=block_bytes,
        block_size=BLOCK_SIZE,
        capacity_bytes=capacity_bytes,
        clock=clock,
        files=files,
    )


def ready_store(root: Path, num_slots: int = 1, **options: Any) -> SegmentStore:
    """Open a store and wait until it has slots to write to."""
    store, _ = open_store(root, **options)
    until(lambda: store.ready_slots >= num_slots)
    return store


def fill(store: SegmentStore, slots: Sequence[int], *, first_number: int = 0) -> list[Place]:
    """Write a block into each slot, one call; returns those that were taken."""
    places = [Place(record(first_number + at), slot) for at, slot in enumerate(slots)]
    payloads = [payload(place.record, store.block_bytes) for place in places]
    stored = store.write(places, payloads)
    return [place for place, is_there in zip(places, stored, strict=True) if is_there]


def grow(store: SegmentStore, num_slots: int | None = None) -> list[int]:
    """Use every slot until there are so many (or no more come); returns how many there were."""
    seen: list[int] = []
    while True:
        ready = store.ready_slots
        fill(store, range(ready))
        seen.append(ready)
        if num_slots is not None and ready >= num_slots:
            return seen
        until(lambda ready=ready: store.ready_slots > ready or not store.is_growing)  # type: ignore[misc]
        if store.ready_slots == ready:
            return seen


def read(
    store: SegmentStore, wanted: Sequence[Place], deadline_s: float = float("inf")
) -> tuple[Outcome, int]:
    """Read blocks; returns the outcome and how many came, all of them proven right."""
    count = 0

    def deliver(index: int, content: memoryview) -> bool:
        nonlocal count
        assert index == count
        assert content == payload(wanted[index].record, store.block_bytes)
        count += 1
        return True

    outcome = store.read(wanted, deliver, deadline_s)
    return outcome, count


def readable(store: SegmentStore, places: Sequence[Place]) -> int:
    """Return how many of the places can be read; every one that can is right."""
    return sum(read(store, [place]) == ("done", 1) for place in places)


def segment_files(root: Path) -> list[Path]:
    return sorted(root.glob("*/seg-??????.kv"))
