from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runner.tiers.gdsf import EvictionOrder

ROOT = b"root"


def saved_s(depth: int) -> float:
    """Deeper blocks cost more to compute; some are worth nothing."""
    return 0.0 if depth % 7 == 6 else 1.0 + depth / 10


class Naive:
    """The same rules, by looking at everything."""

    def __init__(self) -> None:
        self.parent: dict[bytes, bytes] = {}
        self.depth: dict[bytes, int] = {}
        self.touches: Counter[bytes] = Counter()
        self.rank: dict[bytes, tuple[float, int]] = {}
        self.age = 0.0
        self.ticket = 0

    def set_rank(self, key: bytes) -> None:
        self.ticket += 1
        worth = self.touches[key] * max(0.0, saved_s(self.depth[key]))
        self.rank[key] = (self.age + worth, self.ticket)

    def victim(self, pinned: set[bytes]) -> bytes | None:
        parents = set(self.parent.values())
        leaves = [key for key in self.parent if key not in parents and key not in pinned]
        return min(leaves, key=self.rank.__getitem__, default=None)

    def drop(self, key: bytes) -> None:
        del self.parent[key], self.depth[key], self.touches[key], self.rank[key]


class OrderMachine(RuleBasedStateMachine):
    """Random chains that share prefixes, against the naive model."""

    def __init__(self) -> None:
        super().__init__()
        self.order = EvictionOrder(saved_s)
        self.naive = Naive()
        self.pinned: set[bytes] = set()

    @staticmethod
    def path(branches: list[int]) -> list[bytes]:
        return [bytes(branches[:end]) for end in range(1, len(branches) + 1)]

    @rule(
        branches=st.lists(st.integers(0, 2), min_size=1, max_size=8),
        first=st.integers(0, 4),
        touches=st.integers(1, 3),
    )
    def add(self, branches: list[int], first: int, touches: int) -> None:
        """Store a path, or the rear part of one whose front is not held."""
        for depth, key in enumerate(self.path(branches)):
            if depth < first:
                continue
            parent = bytes(branches[:depth]) or ROOT
            self.order.add(key, parent, depth, touches=touches)
            naive = self.naive
            if key in naive.parent:
                naive.touches[key] += 1
            else:
                naive.parent[key], naive.depth[key] = parent, depth
                naive.touches[key] = touches
            naive.set_rank(key)

    @rule(branches=st.lists(st.integers(0, 2), min_size=1, max_size=8))
    def touch(self, branches: list[int]) -> None:
        for key in self.path(branches):
            self.order.touch(key)
            if key in self.naive.parent:
                self.naive.touches[key] += 1
                self.naive.set_rank(key)

    @precondition(lambda self: self.naive.parent)
    @rule(data=st.data())
    def remove_any(self, data: st.DataObject) -> None:
        """A damaged block goes, whether it has children or not."""
        key = data.draw(st.sampled_from(sorted(self.naive.parent)))
        self.order.remove(key)
        self.naive.drop(key)
        self.pinned.discard(key)

    @rule(key=st.binary(min_size=9, max_size=9))
    def remove_unknown(self, key: bytes) -> None:
        self.order.remove(key)

    @precondition(lambda self: self.naive.parent)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.pinned ^= {data.draw(st.sampled_from(sorted(self.naive.parent)))}

    @rule()
    def pop(self) -> None:
        expected = self.naive.victim(self.pinned)

        assert self.order.pop_victim(self.pinned.__contains__) == expected

        if expected is not None:
            self.naive.age = max(self.naive.age, self.naive.rank[expected][0])
            self.naive.drop(expected)

    @rule()
    def clear(self) -> None:
        self.order.clear()
        self.naive = Naive()
        self.naive.ticket = 10**9
        self.pinned.clear()

    @invariant()
    def both_hold_the_same(self) -> None:
        assert len(self.order) == len(self.naive.parent)
        assert all(key in self.order for key in self.naive.parent)


OrderMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestOrderAgainstANaiveModel = OrderMachine.TestCase


def never(_: bytes) -> bool:
    return False


def chain(order: EvictionOrder, name: str, length: int) -> list[bytes]:
    keys = [f"{name}{depth}".encode() for depth in range(length)]
    for depth, key in enumerate(keys):
        order.add(key, keys[depth - 1] if depth else ROOT, depth)
    return keys


def test_a_chain_goes_from_its_end() -> None:
    order = EvictionOrder(lambda depth: 100.0 - depth)
    keys = chain(order, "a", 5)

    assert [order.pop_victim(never) for _ in range(6)] == [*reversed(keys), None]


def test_what_is_asked_for_often_stays_longer() -> None:
    order = EvictionOrder(lambda depth: 1.0)
    cold, hot = chain(order, "cold", 1), chain(order, "hot", 1)
    order.touch(hot[0])
    order.touch(cold[0])
    order.touch(hot[0])

    assert order.pop_victim(never) == cold[0]


def test_what_was_popular_long_ago_fades() -> None:
    order = EvictionOrder(lambda depth: 1.0)
    old = chain(order, "old", 1)[0]
    for _ in range(10):
        order.touch(old)
    gone = set()
    for number in range(30):
        order.add(f"n{number}".encode(), ROOT, 0)
        order.touch(f"n{number}".encode())
        gone.add(order.pop_victim(never))

    assert old in gone


def test_deep_blocks_that_cost_more_to_compute_outlive_shallow_ones() -> None:
    order = EvictionOrder(lambda depth: 1.0 + depth)
    shallow = chain(order, "s", 1)
    order.add(b"deep", b"elsewhere", 50)

    assert order.pop_victim(never) == shallow[0]


def test_a_pinned_leaf_is_passed_over_and_keeps_its_place() -> None:
    order = EvictionOrder(lambda depth: 1.0)
    for name in (b"a", b"b", b"c"):
        order.add(name, ROOT, 0)

    assert order.pop_victim({b"a", b"b"}.__contains__) == b"c"
    assert order.pop_victim({b"a", b"b"}.__contains__) is None
    assert order.pop_victim(never) == b"a"


def test_a_parent_that_comes_after_its_children_is_no_leaf() -> None:
    order = EvictionOrder(lambda depth: 1.0)
    order.add(b"child", b"parent", 1)
    order.touch(b"child")
    order.add(b"parent", ROOT, 0)

    assert order.pop_victim(never) == b"child"
    assert order.pop_victim(never) == b"parent"


def test_a_tier_where_nothing_is_worth_anything_goes_by_age() -> None:
    order = EvictionOrder(lambda depth: -1.0)
    for name in (b"a", b"b", b"c"):
        order.add(name, ROOT, 0)
    order.touch(b"a")

    assert [order.pop_victim(never) for _ in range(3)] == [b"b", b"c", b"a"]


def test_touching_forever_does_not_grow_the_heap() -> None:
    order = EvictionOrder(lambda depth: 1.0)
    keys = [f"k{number}".encode() for number in range(100)]
    for key in keys:
        order.add(key, ROOT, 0)
    for _ in range(200):
        for key in keys:
            order.touch(key)

    assert len(order._leaves) <= 400
    assert sorted(filter(None, (order.pop_victim(never) for _ in keys))) == sorted(keys)
