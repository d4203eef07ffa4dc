"""A rig for the tier manager: a real pool, memory one can look at, and stores that do as told."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from runner.kvkeys import BlockChain, KvKey, namespace_key, root_key
from runner.leases import LeaseBook, LoanedBlock
from runner.pool.blocks import BlockPool
from runner.tiers.arena import allocate_arena
from runner.tiers.assemble import join_tiers
from runner.tiers.host import HostStore
from runner.tiers.manager import TierManager
from runner.tiers.media import Stores
from runner.tiers.types import (
    BlockRecord,
    Committed,
    Deliver,
    Direction,
    GroupMover,
    LoadDone,
    LoadPlan,
    LoadQuery,
    Outcome,
    PeerSource,
    Place,
    TierName,
    TierStats,
)

_T = TypeVar("_T")

BLOCK_SIZE = 4
BLOCK_BYTES = 5000
NAMESPACE = namespace_key({"model": "rig"})


def payload_of(key: KvKey) -> bytes:
    """Return what a block with this key holds: so any wrong byte anywhere is seen."""
    return hashlib.shake_128(key).digest(BLOCK_BYTES)


def bytes_of(block: LoanedBlock) -> bytes:
    """Return what a lent block holds; it must be sound."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    assert block.read_into(buffer)
    return bytes(buffer)


class ManualClock:
    """A monotonic clock that goes when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class Gate:
    """A place where a thread waits until told; open at first."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.num_waiting = 0

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait(self) -> None:
        if not self._open.is_set():
            self.num_waiting += 1
            assert self._open.wait(30), "a test left a gate shut"
            self.num_waiting -= 1


class Memory:
    """The pool's bytes; a ``BlockMover`` that knows which blocks may be written."""

    block_bytes = BLOCK_BYTES
    groups: GroupMover | None = None

    def __init__(self, num_blocks: int) -> None:
        self.rows = np.zeros((num_blocks, BLOCK_BYTES), dtype=np.uint8)
        self.loading: set[int] = set()
        self.strays: list[int] = []
        self.out_gate, self.in_gate = Gate(), Gate()
        self.fails = 0

    def copy_out(self, block: int, target: memoryview) -> None:
        self.out_gate.wait()
        if self.fails:
            self.fails -= 1
            raise RuntimeError("the device is gone")
        target[:] = self.rows[block].tobytes()

    def copy_in(self, source: memoryview, block: int) -> None:
        self.in_gate.wait()
        if block not in self.loading:
            self.strays.append(block)
        self.rows[block] = np.frombuffer(source, dtype=np.uint8)


class ScriptedStore:
    """A medium in memory: slow, failing, damaged or stuck as a test wants it.

    Also a ``RemoteStore`` where slots are all 0: then blocks are found by key.
    """

    block_bytes = BLOCK_BYTES

    def __init__(self, num_slots: int = 0) -> None:
        self.ready_slots = self.num_slots = num_slots
        self.is_growing = False
        self.is_paused = False
        self.is_closed = False
        self.held: dict[object, tuple[BlockRecord, bytearray]] = {}
        self.read_gate, self.write_gate, self.exists_gate = Gate(), Gate(), Gate()
        self.reads: list[int] = []
        self.writes: list[list[int]] = []
        self.num_calls = {"read": 0, "write": 0, "exists": 0}
        # Call number (from 0) -> what happens instead: an Outcome, or an exception.
        self.read_faults: dict[int, Outcome | BaseException] = {}
        self.write_faults: dict[int, BaseException | int] = {}
        self.is_away = False
        self._lock = threading.Lock()

    def _at(self, place: Place) -> object:
        return place.slot if self.num_slots else place.record.key

    def _call(self, kind: str) -> int:
        with self._lock:
            number = self.num_calls[kind]
            self.num_calls[kind] += 1
            return number

    def read(self, wanted: Sequence[Place], deliver: Deliver, deadline_s: float) -> Outcome:
        assert not self.is_closed
        number = self._call("read")
        self.reads.append(len(wanted))
        fault = "failed" if self.is_away else self.read_faults.get(number)
        if isinstance(fault, BaseException):
            raise fault
        for index, place in enumerate(wanted):
            self.read_gate.wait()
            if fault is not None and index == len(wanted) // 2:
                return fault
            record, payload = self.held.get(self._at(place), (None, bytearray()))
            if record is None or record.key != place.record.key:
                return "missing"
            if bytes(payload) != payload_of(record.key):
                return "damaged"
            if not deliver(index, memoryview(payload)):
                return "stopped"
        return "done"

    def write(self, places: Sequence[Place], payloads: Sequence[memoryview]) -> list[bool]:
        assert not self.is_closed
        number = self._call("write")
        self.writes.append([place.slot for place in places])
        fault = self.write_faults.get(number)
        if self.is_away:
            return [False] * len(places)
        if isinstance(fault, BaseException):
            raise fault
        stored = []
        for index, (place, payload) in enumerate(zip(places, payloads, strict=True)):
            self.write_gate.wait()
            is_stored = fault is None or index < fault
            if is_stored:
                self.held[self._at(place)] = place.record, bytearray(payload)
            stored.append(is_stored)
        return stored

    def exists(self, keys: Sequence[KvKey], deadline_s: float) -> list[bool]:
        self._call("exists")
        self.exists_gate.wait()
        return [not self.is_away and key in self.held for key in keys]

    def invalidate(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.held.pop(slot, None)

    def damage(self, key: KvKey) -> None:
        for record, payload in self.held.values():
            if record.key == key:
                payload[0] ^= 1

    def lose(self, key: KvKey) -> None:
        for at, (record, _) in list(self.held.items()):
            if record.key == key:
                del self.held[at]

    def keys(self) -> set[KvKey]:
        return {record.key for record, _ in self.held.values()}

    def close(self) -> None:
        self.is_closed = True


class ScriptedPeers:
    """A ``PeerStore`` whose peers hold what they are given."""

    def __init__(self, **stores: ScriptedStore) -> None:
        self.stores = {f"http://{name}:1": store for name, store in stores.items()}
        self.stores.setdefault("http://a:1", ScriptedStore())
        self.asked: list[str] = []

    def figures(self) -> dict[str, object]:
        return dict.fromkeys(self.stores)

    def read_from(
        self, url: str, wanted: Sequence[Place], deliver: Deliver, deadline_s: float
    ) -> Outcome:
        self.asked.append(url)
        return self.stores[url].read(wanted, deliver, deadline_s)

    def close(self) -> None:
        pass


@dataclass
class Observer:
    """Collects what a ``TransferObserver`` hears."""

    moves: list[tuple[TierName, Direction, int]] = field(default_factory=list)

    def transferred(
        self, tier: TierName, direction: Direction, elapsed_s: float, num_bytes: int
    ) -> None:
        self.moves.append((tier, direction, num_bytes))

    def gained(self, predicted_s: float, actual_s: float) -> None:
        pass


class Rig:
    """One engine's worth of pool and tiers, driven by a test in place of the engine."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        host_slots: int = 0,
        disk: ScriptedStore | None = None,
        recovered: tuple[Place, ...] = (),
        remote: ScriptedStore | None = None,
        peers: ScriptedPeers | None = None,
        clock: Callable[[], float] | None = None,
        token_s: float = 1.0,
    ) -> None:
        # Stands still, so that no deadline passes on a busy machine unless a test wants it to.
        manual = ManualClock()
        self.clock = clock = clock or manual
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.memory = Memory(num_blocks)
        self.leases = LeaseBook(self.pool.pin, self.pool.unpin)
        self.observer = Observer()
        self.wakes = threading.Semaphore(0)
        self.host = None
        if host_slots:
            self.host = HostStore(
                allocate_arena(host_slots * 8192, BLOCK_BYTES, option="test"), clock=clock
            )
        self.tiers: TierManager = join_tiers(
            Stores(self.host, disk, recovered, remote, peers),  # type: ignore[arg-type]
            pool=self.pool,
            mover=self.memory,
            leases=self.leases,
            namespace=NAMESPACE,
            chunk_tokens=64,
            wake=self.wakes.release,
            observer=self.observer,
            clock=clock,
            sleep=self._sleep,
        )
        # So dear that restoring always pays, unless a test wants it otherwise.
        for tokens in (16, 32, 64):
            self.tiers.observe_step(tokens, tokens * tokens, 0, tokens * token_s)
        self.done: list[LoadDone] = []
        self.events: list[object] = []
        self._num_owners = 0

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        if isinstance(self.clock, ManualClock):
            self.clock.advance(seconds)

    def chain(self, tokens: Sequence[int], salt: str = "") -> BlockChain:
        chain = BlockChain(root_key(NAMESPACE, salt=salt), BLOCK_SIZE, salt)
        chain.extend(tokens)
        return chain

    def compute(
        self, tokens: Sequence[int], salt: str = "", *, can_store: bool = True
    ) -> BlockChain:
        """Compute a prompt as the engine does; its blocks are offered, then cached."""
        chain = self.chain(tokens, salt)
        hits = self.pool.find(chain, len(chain.keys))
        self.pool.take(hits)
        new = self.pool.allocate(len(chain.keys) - len(hits))
        assert new is not None, "the rig's pool is too small"
        blocks = hits + new
        for block, key in zip(new, chain.keys[len(hits) :], strict=True):
            self.memory.rows[block] = np.frombuffer(payload_of(key), dtype=np.uint8)
        self.pool.commit(blocks, chain, len(hits), len(chain.keys))
        now_s = self.clock()
        self.tiers.touch(chain.keys, now_s)
        self.tiers.offer(
            [
                Committed(self.pool.record_of(block), block, chain, can_store)
                for block in blocks
                if self.pool.block_of(self.pool.record_of(block).key) == block
            ],
            now_s,
        )
        self.pool.release(blocks, chain)
        return chain

    def forget_pool(self) -> None:
        """Evict everything that can be."""
        room = self.pool.num_free + self.pool.num_cached
        while room:
            blocks = self.pool.allocate(room)
            if blocks is not None:
                self.pool.release(blocks, self.chain([]))
                break
            room -= 1
        self.pool.drain_events()

    def query(
        self,
        chain: BlockChain,
        *,
        owner: str = "",
        source: PeerSource | None = None,
        max_blocks: int | None = None,
    ) -> LoadQuery:
        self._num_owners += 1
        num_hits = len(self.pool.find(chain, len(chain.keys)))
        return LoadQuery(
            owner or f"request-{self._num_owners}",
            chain,
            num_hits,
            len(chain.keys) if max_blocks is None else max_blocks,
            len(chain.keys) * BLOCK_SIZE + 1,
            0,
            source,
        )

    def consider(self, query: LoadQuery) -> LoadPlan | None:
        """Ask until there is an answer."""
        end = time.monotonic() + 10
        while True:
            self.poll()
            plan = self.tiers.consider(query, self.clock())
            if plan != "pending":
                return plan
            assert time.monotonic() < end, "a look-up stays pending"
            self.wakes.acquire(timeout=0.01)

    def start(self, plan: LoadPlan) -> list[int]:
        """Reserve blocks and begin."""
        blocks = self.pool.reserve_loading(plan.num_blocks)
        assert blocks is not None
        self.memory.loading |= set(blocks)
        self.tiers.start(plan, blocks)
        return blocks

    def finish(self, plan: LoadPlan, blocks: list[int]) -> LoadDone:
        """Wait for a load's end and verify every block that it says has come."""
        done = self.wait(lambda: self.taken(plan.id))
        self.memory.loading -= set(blocks)
        first = plan.query.first_block
        for at, block in enumerate(blocks[: done.num_blocks]):
            expected = payload_of(plan.query.chain.keys[first + at])
            assert self.memory.rows[block].tobytes() == expected
        self.pool.release_loading(blocks)
        return done

    def pass_deadline(self, by_s: float = 0.001) -> None:
        """Let the time come at which the load under way is given up."""
        deadline_s = self.tiers._loader.next_deadline_s()
        assert deadline_s is not None
        assert isinstance(self.clock, ManualClock)
        self.clock.now_s = deadline_s + by_s

    def restore(self, chain: BlockChain, **ask: object) -> LoadDone | None:
        """Load what the tiers have of a prompt; None if they would rather not."""
        plan = self.consider(self.query(chain, **ask))  # type: ignore[arg-type]
        return None if plan is None else self.finish(plan, self.start(plan))

    def taken(self, plan_id: int) -> LoadDone | None:
        for done in self.done:
            if done.plan_id == plan_id:
                self.done.remove(done)
                return done
        return None

    def poll(self) -> None:
        now_s = self.clock()
        self.done += self.tiers.poll(now_s)
        self.leases.sweep(now_s)
        self.events += self.tiers.drain_events()

    def wait(self, condition: Callable[[], _T | None], what: str = "") -> _T:
        """Poll as an engine does until something is there."""
        end = time.monotonic() + 10
        while True:
            self.poll()
            answer = condition()
            if answer:
                return answer
            assert time.monotonic() < end, f"not reached: {what or condition}"
            self.wakes.acquire(timeout=0.01)

    def settle(self) -> None:
        """Wait until nothing is under way."""
        self.wait(lambda: not self.tiers.has_work)

    def stats(self, tier: TierName) -> TierStats:
        return next(stats for stats in self.tiers.stats() if stats.tier == tier)

    def check(self) -> None:
        """Everything is back where it belongs; nothing was written where it must not."""
        self.settle()
        self.wait(lambda: not any(lane.num_open for lane in self.tiers._parts.lanes))
        assert not self.memory.strays
        assert len(self.leases) == 0
        assert self.pool.num_pinned == 0
        for tier in self.tiers._tiers.values():
            if tier.books is not None:
                tier.books.check()
                assert tier.books.num_pinned == 0
                assert not tier.books.num_writing
            assert tier.leases is None or len(tier.leases) == 0
            assert tier.storing_bytes == 0
            assert tier.reader.queued_bytes == 0
