"""The books return to zero whatever happens, and count shared blocks once meanwhile."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.routing.active import ActiveBlocks, common_until
from gateway.routing.books import Books, Charge
from gateway.routing.cost import OUTPUT_ALLOWANCE_TOKENS
from prefix_index.blocks import BlockHash, hash_blocks, root_hash

BLOCK = 4
ROOT = root_hash("m")
# Few different tokens and short blocks, so that prompts share beginnings of all lengths.
TOKENS = st.lists(st.integers(0, 1), max_size=40)


def chain(token_ids: list[int]) -> list[BlockHash]:
    return hash_blocks(token_ids, BLOCK, ROOT)


class BooksMachine(RuleBasedStateMachine):
    """Requests come, get first tokens, end and end again, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.books = Books(BLOCK)
        self.now_s = 0.0
        self.open: dict[Charge, tuple[list[int], int, bool]] = {}
        self.closed: list[Charge] = []

    @rule(tokens=TOKENS, prefill_s=st.floats(0, 1e3), after_s=st.floats(0, 10))
    def charge(self, tokens: list[int], prefill_s: float, after_s: float) -> None:
        self.now_s += after_s
        uncached = max(1, len(tokens) // 2)
        charge = self.books.charge(
            self.now_s,
            prompt_tokens=len(tokens),
            uncached_tokens=uncached,
            prefill_s=prefill_s,
            due_s=self.now_s + prefill_s,
            hashes=chain(tokens),
        )
        self.open[charge] = (tokens, uncached, True)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        charge = data.draw(st.sampled_from(list(self.open)))
        self.books.first_token(charge, self.now_s)
        tokens, uncached, _ = self.open[charge]
        self.open[charge] = (tokens, uncached, False)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        charge = data.draw(st.sampled_from(list(self.open)))
        self.books.finish(charge)
        del self.open[charge]
        self.closed.append(charge)

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def end_again(self, data: st.DataObject) -> None:
        charge = data.draw(st.sampled_from(self.closed))
        self.books.finish(charge)
        self.books.first_token(charge, self.now_s)

    @invariant()
    def totals_are_those_of_the_open_requests(self) -> None:
        books = self.books
        blocks = {block for tokens, _, _ in self.open.values() for block in chain(tokens)}
        tails = sum(
            len(t) - len(t) // BLOCK * BLOCK + OUTPUT_ALLOWANCE_TOKENS
            for t, _, _ in self.open.values()
        )
        assert books.in_flight == len(self.open)
        assert books.queued_tokens == sum(u for _, u, queued in self.open.values() if queued)
        assert books.num_decoding == sum(not queued for _, _, queued in self.open.values())
        assert books.active_tokens == len(blocks) * BLOCK + tails
        assert books.context_tokens == sum(
            len(t) + OUTPUT_ALLOWANCE_TOKENS for t, _, _ in self.open.values()
        )
        assert books.queued_s == pytest.approx(
            sum(c.prefill_s for c, (_, _, queued) in self.open.items() if queued), abs=1e-6
        )
        assert 0.0 <= books.progress_at_s <= self.now_s
        if not self.open:
            assert books.queued_s == 0.0
            assert books.overdue_s(self.now_s + 1e9) == 0.0


TestBooks = BooksMachine.TestCase


@given(prompts=st.lists(TOKENS, max_size=8), probe=TOKENS, data=st.data())
def test_the_tree_of_active_blocks_equals_plain_reference_counts(
    prompts: list[list[int]], probe: list[int], data: st.DataObject
) -> None:
    tree = ActiveBlocks()
    counts: Counter[BlockHash] = Counter()
    handles = []
    for tokens in prompts:
        handles.append((tree.add(chain(tokens)), chain(tokens)))
        counts.update(chain(tokens))
    for handle, hashes in data.draw(st.permutations(handles)):
        wanted = chain(probe)
        common = next((i for i, block in enumerate(wanted) if not counts[block]), len(wanted))

        assert tree.common_blocks(wanted) == common
        assert tree.num_blocks == sum(count > 0 for count in counts.values())
        tree.release(handle)
        counts.subtract(hashes)
    assert tree.num_blocks == 0
    assert tree.common_blocks(chain(probe)) == 0


@given(left=TOKENS, right=TOKENS)
def test_two_chains_part_where_their_first_blocks_differ(left: list[int], right: list[int]) -> None:
    a, b = chain(left), chain(right)
    end = min(len(a), len(b))
    parted = next((i for i in range(end) if a[i] != b[i]), end)

    assert common_until(a, b, 0, end) == parted


def test_the_wait_counts_from_the_routing_that_ended_an_idle_time() -> None:
    books = Books(BLOCK)
    books.charge(500.0, prompt_tokens=8, uncached_tokens=8, prefill_s=1.0)
    assert books.progress_at_s == 500.0
    second = books.charge(500.4, prompt_tokens=8, uncached_tokens=8, prefill_s=1.0)
    assert books.progress_at_s == 500.0

    books.first_token(second, 501.0)
    assert books.progress_at_s == 501.0


def test_restores_queue_behind_each_other_on_the_link() -> None:
    books = Books(BLOCK)
    books.charge(10.0, prompt_tokens=8, uncached_tokens=1, restore_s=2.0)
    books.charge(10.5, prompt_tokens=8, uncached_tokens=1, restore_s=1.0)
    assert books.restore_until_s == 13.0
    books.charge(10.6, prompt_tokens=8, uncached_tokens=8)
    assert books.restore_until_s == 13.0


def test_lateness_is_that_of_the_request_routed_first() -> None:
    books = Books(BLOCK)
    first = books.charge(0.0, prompt_tokens=8, uncached_tokens=8, due_s=1.0)
    books.charge(0.0, prompt_tokens=8, uncached_tokens=8, due_s=2.0)
    assert books.overdue_s(0.5) == 0.0
    assert books.overdue_s(4.0) == 3.0
    books.first_token(first, 4.0)
    assert books.overdue_s(4.0) == 2.0


def test_only_a_request_that_meets_no_queue_and_few_decodes_found_the_worker_idle() -> None:
    books = Books(BLOCK)
    charges = []
    for expected in (True, True, True, False):
        charge = books.charge(0.0, prompt_tokens=8, uncached_tokens=8)
        assert charge.found_idle is expected
        books.first_token(charge, 0.0)
        charges.append(charge)
    for charge in charges:
        books.finish(charge)
    books.charge(1.0, prompt_tokens=8, uncached_tokens=8)
    assert not books.charge(1.0, prompt_tokens=8, uncached_tokens=8).found_idle


def test_pulls_queue_behind_each_other_on_both_links() -> None:
    target, source = Books(BLOCK), Books(BLOCK)
    for _ in range(2):
        target.charge(10.0, prompt_tokens=10, uncached_tokens=1, pull_s=2.0)
        source.hand_over(10.0, 2.0)
    assert (target.load.in_busy_until_s, source.out_busy_until_s) == (14.0, 14.0)
    target.charge(100.0, prompt_tokens=10, uncached_tokens=1, pull_s=1.0)

    assert target.load.in_busy_until_s == 101.0
    assert (target.out_busy_until_s, source.load.in_busy_until_s) == (0.0, 0.0)


def test_another_block_size_counts_at_once() -> None:
    books = Books(4)
    books.charge(0.0, prompt_tokens=40, uncached_tokens=40, hashes=chain([0] * 40))
    books.block_size = 8

    assert books.active_tokens == 80 + OUTPUT_ALLOWANCE_TOKENS
