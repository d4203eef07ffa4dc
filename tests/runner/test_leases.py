"""Leases on blocks: pins with an owner and a deadline, and blocks lent to other runners."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from runner.engine import Engine, EngineStoppedError
from runner.kvkeys import BlockChain, root_key
from runner.leases import LeaseBook
from runner.model import Model
from runner.pool.blocks import BlockPool
from runner.pool.states import BlockState, InvariantError
from runner.types import EngineConfig
from tests.runner.driver import Driver
from tests.runner.fake_tiers import FakeTiers
from tests.runner.test_blocks import SIZE, chain_of, finish_prompt, run_prompt
from tests.runner.test_engine import Inbox, request, wait_until


class Pins(Counter[int]):
    """Counts pins as a pool would."""

    def book(self) -> LeaseBook:
        return LeaseBook(self._pin, self._unpin)

    def _pin(self, block: int) -> None:
        self[block] += 1

    def _unpin(self, block: int) -> None:
        assert self[block] > 0
        self[block] -= 1


def test_a_lease_pins_until_it_is_released_once() -> None:
    pins = Pins()
    book = pins.book()
    first = book.take("a", "store", 10.0, [1, 2])
    second = book.take("a", "peer", 20.0, [2])
    assert pins == {1: 1, 2: 2}
    assert book.next_deadline_s() == 10.0

    assert book.release(first)
    assert not book.release(first)
    assert (+pins, first in book, second in book, len(book)) == (Pins({2: 1}), False, True, 1)


def test_a_sweep_frees_and_counts_what_its_owner_forgot() -> None:
    pins = Pins()
    book = pins.book()
    late, early = book.take("a", "store", 10.0, [1]), book.take("b", "peer", 20.0, [2])

    assert book.sweep(9.9) == []
    assert book.sweep(10.0) == [late]
    assert not book.release(late), "an owner that comes back late frees nothing twice"
    assert (+pins, book.orphans_total) == (Pins({2: 1}), 1)
    assert book.release(early)


def test_an_owner_gives_all_its_leases_back_and_nobody_elses() -> None:
    pins = Pins()
    book = pins.book()
    for owner, block in (("a", 1), ("b", 2), ("a", 3)):
        book.take(owner, "peer", 10.0, [block])

    assert book.release_owner("a") == 2
    assert book.release_owner("a") == 0
    assert +pins == Pins({2: 1})
    book.release_all()
    assert not +pins
    assert book.next_deadline_s() is None


def test_a_pinned_block_is_found_but_neither_evicted_nor_cached_until_it_is_unpinned() -> None:
    pool = BlockPool(4, SIZE)
    first, last = finish_prompt(pool, [1] * 8)
    pool.pin(last)
    pool.pin(last)
    assert pool.state(last) is BlockState.PINNED
    assert (pool.num_pinned, pool.num_cached, pool.num_free) == (1, 1, 2)

    # The parent of a pinned block is kept too: what is stored is a whole prefix.
    assert pool.allocate(3) is None
    assert pool.find(chain_of([1] * 8), 2) == [first, last]
    pool.unpin(last)
    assert pool.allocate(3) is None
    pool.unpin(last)
    pool.check([])
    assert set(pool.allocate(4) or []) >= {first, last}


def test_a_pin_outlives_the_sequence_and_a_sequence_the_pin() -> None:
    pool = BlockPool(4, SIZE)
    blocks, chain = run_prompt(pool, [1] * 8)
    pool.pin(blocks[0])
    assert pool.state(blocks[0]) is BlockState.ACTIVE
    pool.release(blocks, chain)
    assert pool.state(blocks[0]) is BlockState.PINNED
    pool.take([blocks[0]])
    pool.unpin(blocks[0])
    assert pool.state(blocks[0]) is BlockState.ACTIVE

    pool.release([blocks[0]], chain)
    pool.check([])
    assert pool.num_cached == 2


def test_pins_survive_a_reset_and_the_block_is_free_after_them() -> None:
    pool = BlockPool(4, SIZE)
    blocks = finish_prompt(pool, [1] * 8)
    pool.pin(blocks[0])
    assert pool.clear()

    assert pool.find(chain_of([1] * 8), 2) == []
    assert pool.state(blocks[0]) is BlockState.PINNED
    assert set(pool.allocate(3) or []) == set(range(4)) - {blocks[0]}
    assert pool.allocate(1) is None
    pool.unpin(blocks[0])
    assert pool.allocate(1) == [blocks[0]]
    pool.check([[0], [1], [2], [3]])


def test_what_is_not_pinned_or_has_no_content_cannot_be_unpinned_or_pinned() -> None:
    pool = BlockPool(4, SIZE)
    with pytest.raises(InvariantError):
        pool.unpin(0)
    with pytest.raises(InvariantError):
        pool.pin(0)


def bytes_of(driver: Driver, block: int) -> bytes:
    return driver.core._kv.data[block].numpy().tobytes()


def chain_over(driver: Driver, tokens: list[int], salt: str = "") -> BlockChain:
    chain = BlockChain(root_key(driver.core.namespace, salt=salt), 16, salt)
    chain.extend(tokens)
    return chain


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(2, 97) for _ in range(length)]


def test_leading_blocks_are_lent_from_the_pool_with_their_bytes(tiny: Model) -> None:
    driver = Driver(tiny)
    prompt = prompt_of(100)
    driver.complete(prompt)
    chain = chain_over(driver, prompt)
    missing = chain_over(driver, prompt_of(32)).keys

    loan = driver.core.lend([*chain.keys[:4], missing[0], chain.keys[5]], "peer-1", 1e9)
    assert [block.record.key for block in loan.blocks] == chain.keys[:4]
    assert [block.record.depth for block in loan.blocks] == [0, 1, 2, 3]
    assert loan.blocks[1].record.parent == chain.keys[0]
    assert loan.blocks[1].record.tokens == chain.tokens[1]
    driver.check()
    assert driver.core.stats().pinned_blocks == 4
    held = driver.core._pool.find(chain, 4)
    for block, lent in zip(held, loan.blocks, strict=True):
        buffer = bytearray(driver.core.stats().block_bytes)
        lent.read_into(memoryview(buffer))
        assert bytes(buffer) == bytes_of(driver, block)
    driver.core.give_back("peer-1")
    driver.core.give_back("nobody")
    driver.check()
    assert driver.core.stats().pinned_blocks == 0


def test_lent_blocks_keep_their_bytes_while_the_pool_is_short(tiny: Model) -> None:
    driver = Driver(tiny, pool_tokens=8 * 16)
    prompt = prompt_of(50)
    driver.complete(prompt, max_tokens=1)
    chain = chain_over(driver, prompt)
    block = driver.core._pool.find(chain, 1)[0]
    before = bytes_of(driver, block)
    loan = driver.core.lend(chain.keys, "peer", 1e9)
    assert len(loan.blocks) == 3
    for seed in range(3):
        driver.complete([*prompt_of(60 + seed)], max_tokens=4)

    assert bytes_of(driver, block) == before
    driver.core.give_back("peer")
    driver.check()


def test_a_loan_nobody_gives_back_ends_at_its_deadline_and_is_counted(tiny: Model) -> None:
    driver = Driver(tiny)
    prompt = prompt_of(50)
    driver.complete(prompt)
    driver.core.lend(chain_over(driver, prompt).keys, "peer", time.monotonic() + 0.05)
    assert driver.core.needs_turns
    sleep_s = driver.core.sleep_s()
    assert sleep_s is not None
    assert 0 < sleep_s <= 0.05
    driver.settle(lambda: not driver.core.needs_turns)

    stats = driver.core.stats()
    assert (stats.pinned_blocks, stats.orphans_total) == (0, 1)


def test_blocks_beneath_the_pool_are_lent_too(tiny: Model) -> None:
    tiers = FakeTiers()
    driver = Driver(tiny, build_tiers=tiers.build)
    prompt = prompt_of(100)
    driver.complete(prompt)
    held = dict(tiers.held)
    driver.core.reset_prefix_cache()
    tiers.held = held
    driver.complete(prompt[:40], max_load_tokens=0)
    chain = chain_over(driver, prompt)

    loan = driver.core.lend(chain.keys, "peer", 1e9)
    assert [block.record.key for block in loan.blocks] == chain.keys
    assert driver.core.stats().pinned_blocks == 2
    buffer = np.zeros(driver.core.stats().block_bytes, dtype=np.uint8)
    loan.blocks[5].read_into(buffer.data)
    assert buffer.tobytes() == held[chain.keys[5]][1]


def test_the_engine_lends_while_it_computes_and_refuses_after_its_end(tiny: Model) -> None:
    engine = Engine(tiny, EngineConfig(pool_tokens=4096, debug_checks=True))
    engine.start()
    inbox, other = Inbox(), Inbox()
    prompt = prompt_of(100)
    engine.submit(request("a", inbox, prompt))
    inbox.wait()
    engine.submit(request("b", other, [2, 3, 4], max_tokens=300))
    chain = BlockChain(root_key(engine.namespace), 16)
    chain.extend(prompt)

    loan = engine.lend(chain.keys, "peer", time.monotonic() + 30).result(20)
    assert len(loan.blocks) == 6
    assert other.outputs == [] or other.outputs[-1].finish_reason is None
    engine.give_back("peer")
    other.wait()
    assert engine.stop(10)
    with pytest.raises(EngineStoppedError):
        engine.lend(chain.keys, "peer", time.monotonic() + 30).result(20)
    engine.give_back("peer")


def test_a_loan_does_not_wait_for_the_step_that_is_under_way(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny, EngineConfig(pool_tokens=4096, debug_checks=True))
    engine.start()
    inbox, other = Inbox(), Inbox()
    prompt = prompt_of(100)
    engine.submit(request("a", inbox, prompt))
    inbox.wait()
    chain = BlockChain(root_key(engine.namespace), 16)
    chain.extend(prompt)
    forward, begun, go_on = tiny.forward, threading.Event(), threading.Event()

    def held_up(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(20)
        return forward(*args)

    monkeypatch.setattr(tiny, "forward", held_up)
    engine.submit(request("b", other, prompt_of(90), max_tokens=20))
    assert begun.wait(20)
    loans = [engine.lend(chain.keys, f"peer-{k}", time.monotonic() + 30) for k in range(3)]
    assert [len(loan.result(20).blocks) for loan in loans] == [6, 6, 6]
    engine.give_back("peer-0")
    assert other.outputs == []
    go_on.set()
    assert other.wait().finish_reason == "length"
    wait_until(lambda: engine.stats().pinned_blocks == 6)
    for k in range(3):
        engine.give_back(f"peer-{k}")
    wait_until(lambda: engine.stats().pinned_blocks == 0)
    assert engine.stop(10)
