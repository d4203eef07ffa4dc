"""Any order of computing, loading, cancelling, failing and evicting leaves sound books."""

from __future__ import annotations

import time

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runner.kvkeys import KvKey
from runner.tiers.types import LoadPlan
from tests.runner.tier_parts import (
    BLOCK_SIZE,
    ManualClock,
    Rig,
    ScriptedStore,
    bytes_of,
    payload_of,
)

# Prompts of up to 8 blocks that share beginnings: few enough that they meet again and again.
PROMPTS = st.builds(
    lambda trunk, branch, num_blocks: [
        *range(trunk * 1000, trunk * 1000 + 4 * BLOCK_SIZE),
        *range(branch * 100_000, branch * 100_000 + 4 * BLOCK_SIZE),
    ][: num_blocks * BLOCK_SIZE],
    st.integers(0, 2),
    st.integers(1, 3),
    st.integers(1, 8),
)
SLOTTED = {"cpu": 12, "disk": 20}


class TiersMachine(RuleBasedStateMachine):
    """A pool of 40 blocks over small tiers whose stores stall, fail, lose and damage."""

    @initialize()
    def build(self) -> None:
        self.clock = ManualClock()
        self.disk, self.remote = ScriptedStore(SLOTTED["disk"]), ScriptedStore()
        self.rig = Rig(
            num_blocks=40,
            host_slots=SLOTTED["cpu"],
            disk=self.disk,
            remote=self.remote,
            clock=self.clock,
        )
        self.loads: dict[int, tuple[LoadPlan, list[int]]] = {}
        self.spoiled: set[KvKey] = set()
        self.num_owners = 0

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.open_gates()
        for plan, blocks in list(self.loads.values()):
            self.rig.finish(plan, blocks)
        self.rig.check()
        self.check_stores()
        self.rig.tiers.close()

    @rule(prompt=PROMPTS, can_store=st.booleans())
    def compute(self, prompt: list[int], can_store: bool) -> None:
        chain = self.rig.chain(prompt)
        needed = len(chain.keys) - len(self.rig.pool.find(chain, len(chain.keys)))
        if needed <= self.rig.pool.num_free + self.rig.pool.num_cached - 8:
            self.rig.compute(prompt, can_store=can_store)

    @rule(prompt=PROMPTS, is_shy=st.booleans())
    def load(self, prompt: list[int], is_shy: bool) -> None:
        """Ask for a load and start it, unless the pool has no room or the engine thinks again."""
        self.num_owners += 1
        query = self.rig.query(self.rig.chain(prompt), owner=f"owner-{self.num_owners}")
        if query.first_block >= query.max_blocks:
            return
        plan = self.rig.tiers.consider(query, self.clock())
        if not isinstance(plan, LoadPlan):
            return
        room = self.rig.pool.num_free + self.rig.pool.num_cached
        if is_shy or plan.num_blocks > room - 8:
            self.rig.tiers.cancel(query.owner)
            return
        self.loads[plan.id] = plan, self.rig.start(plan)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        plan, _ = self.loads[data.draw(st.sampled_from(sorted(self.loads)))]
        self.rig.tiers.cancel(plan.query.owner)

    @rule(num_polls=st.integers(1, 3))
    def poll(self, num_polls: int) -> None:
        for _ in range(num_polls):
            self.rig.wakes.acquire(timeout=0.001)
            self.rig.poll()
        self.collect()

    @rule(seconds=st.sampled_from([0.001, 0.05, 1.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def evict_the_pool(self) -> None:
        self.rig.forget_pool()

    @rule(which=st.sampled_from(["out", "in", "read", "write", "exists"]))
    def shut_gate(self, which: str) -> None:
        memory = self.rig.memory
        for gate in {
            "out": [memory.out_gate],
            "in": [memory.in_gate],
            "read": [self.disk.read_gate, self.remote.read_gate],
            "write": [self.disk.write_gate, self.remote.write_gate],
            "exists": [self.remote.exists_gate],
        }[which]:
            gate.shut()

    @rule()
    def open_gates(self) -> None:
        memory = self.rig.memory
        for gate in (
            memory.out_gate,
            memory.in_gate,
            *(store.read_gate for store in (self.disk, self.remote)),
            *(store.write_gate for store in (self.disk, self.remote)),
            self.remote.exists_gate,
        ):
            gate.open()

    @rule(
        on_disk=st.booleans(),
        fault=st.sampled_from([OSError(5, "EIO"), ValueError("a bug"), 0, 1]),
    )
    def fail_next_write(self, on_disk: bool, fault: BaseException | int) -> None:
        store = self.disk if on_disk else self.remote
        store.write_faults[store.num_calls["write"]] = fault

    @rule(on_disk=st.booleans(), fault=st.sampled_from(["failed", OSError(5, "EIO")]))
    def fail_next_read(self, on_disk: bool, fault: object) -> None:
        store = self.disk if on_disk else self.remote
        store.read_faults[store.num_calls["read"]] = fault  # type: ignore[assignment]

    @rule()
    def fail_next_copy(self) -> None:
        self.rig.memory.fails = 1

    @rule(prompt=PROMPTS, is_damage=st.booleans(), on_disk=st.booleans())
    def spoil(self, prompt: list[int], is_damage: bool, on_disk: bool) -> None:
        key = self.rig.chain(prompt).keys[-1]
        store = self.disk if on_disk else self.remote
        (store.damage if is_damage else store.lose)(key)
        self.spoiled.add(key)

    @rule()
    def remote_goes_and_comes(self) -> None:
        self.remote.is_away = not self.remote.is_away

    @rule()
    def reset(self) -> None:
        self.rig.tiers.clear()

    @rule(prompt=PROMPTS)
    def lend(self, prompt: list[int]) -> None:
        keys = self.rig.chain(prompt).keys
        for block in self.rig.tiers.pin_cpu(keys, "borrower", self.clock() + 10):
            assert bytes_of(block) == payload_of(block.record.key)
        self.rig.tiers.unpin_cpu("borrower")

    def collect(self) -> None:
        """Take the loads that have ended; what they say is in the pool must be right."""
        for done in list(self.rig.done):
            plan, blocks = self.loads.pop(done.plan_id)
            self.rig.finish(plan, blocks)

    @invariant()
    def bounds_hold(self) -> None:
        if not hasattr(self, "rig"):
            return
        assert not self.rig.memory.strays
        for tier in self.rig.tiers._tiers.values():
            if tier.books is not None:
                tier.books.check()
                assert len(tier.books) <= SLOTTED[tier.name]
            assert 0 <= tier.storing_bytes <= tier.max_storing_bytes

    def check_stores(self) -> None:
        """Once all is quiet, the disk holds what the books say, but for what a test spoiled."""
        books = self.rig.tiers._tiers["disk"].books
        end = time.monotonic() + 10
        while any(lane.num_open for lane in self.rig.tiers._parts.lanes):
            assert time.monotonic() < end
            self.rig.poll()
        in_books = {(entry.record.key, entry.slot) for entry in books}
        in_store = {(record.key, slot) for slot, (record, _) in self.disk.held.items()}
        assert {key for key, _ in in_books - in_store} <= self.spoiled
        assert {key for key, _ in in_store - in_books} <= self.spoiled


TestTiersMachine = TiersMachine.TestCase
TestTiersMachine.settings = settings(
    max_examples=25,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
