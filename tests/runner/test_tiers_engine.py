"""Loading beneath the pool, on a real (tiny) model over scripted tiers: who waits, who goes on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from prefix_index.events import BlockRemoved, BlockStored
from runner.model import Model
from runner.tiers.types import PeerSource
from tests.runner.driver import Driver
from tests.runner.fake_tiers import FakeTiers


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(2, 97) for _ in range(length)]


@dataclass
class World:
    """A driver over scripted tiers."""

    driver: Driver
    tiers: FakeTiers

    @classmethod
    def of(cls, model: Model, **sizes: Any) -> World:
        tiers = FakeTiers()
        return cls(Driver(model, build_tiers=tiers.build, **sizes), tiers)

    def store(self, prompt: list[int], **params: Any) -> list[int]:
        """Run a prompt and drop it from the pool, though not from the tier; returns its tokens."""
        tokens = self.driver.complete(prompt, **params)
        self.forget_pool()
        return tokens

    def forget_pool(self) -> None:
        held = dict(self.tiers.held)
        assert self.driver.core.reset_prefix_cache()
        self.tiers.held = held


@pytest.fixture
def world(tiny: Model) -> World:
    return World.of(tiny)


def test_what_the_tier_holds_is_loaded_and_gives_the_same_tokens(world: World) -> None:
    prompt = prompt_of(100)
    expected = world.store(prompt)
    request_id = world.driver.submit(prompt)
    world.driver.run()

    assert world.driver.tokens(request_id) == expected
    last = world.driver.last(request_id)
    assert (last.cached_tokens, last.hit_source) == (96, "disk")
    stats = world.driver.core.stats()
    assert stats.hit_tokens["disk"] == 96
    assert (stats.active_blocks, stats.loading_blocks) == (0, 0)


def test_a_load_begins_where_the_pool_ends(world: World) -> None:
    prompt = prompt_of(100)
    expected = world.store(prompt)
    world.driver.complete(prompt[:40])
    request_id = world.driver.submit(prompt)
    world.driver.run()

    query = world.tiers.queries[-1]
    assert (query.first_block, query.max_blocks, query.prompt_tokens) == (2, 6, 100)
    assert world.driver.tokens(request_id) == expected
    assert world.driver.core.stats().hit_tokens == {
        "gpu": 32,
        "cpu": 0,
        "disk": 32 + 64,
        "remote": 0,
        "peer": 0,
    }


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_prompts_at_block_boundaries_come_back_whole(world: World, length: int) -> None:
    prompt = prompt_of(length)
    expected = world.store(prompt)
    request_id = world.driver.submit(prompt)
    world.driver.run()

    assert world.driver.tokens(request_id) == expected
    assert world.driver.cached_tokens(request_id) == (length - 1) // 16 * 16


def test_others_run_while_one_loads(world: World) -> None:
    prompt = prompt_of(100)
    expected = world.store(prompt)
    world.tiers.is_held = True
    loading = world.driver.submit(prompt)
    other = world.driver.submit(prompt_of(30, 1), max_tokens=5)
    for _ in range(8):
        world.driver.step()

    assert world.driver.last(other).finish_reason == "length"
    assert world.driver.tokens(loading) == []
    stats = world.driver.core.stats()
    assert (stats.num_loading, stats.num_running, stats.loading_blocks) == (1, 0, 6)
    assert world.driver.core.sleep_s() != 0, "with nothing to compute the thread may sleep"
    world.tiers.is_held = False
    world.driver.run()
    assert world.driver.tokens(loading) == expected


def test_a_look_up_under_way_holds_up_nobody_else_and_is_asked_again(world: World) -> None:
    prompt = prompt_of(100)
    expected = world.store(prompt)
    world.tiers.is_pending = True
    pending = world.driver.submit(prompt)
    other = world.driver.submit([5, 6, 7], max_tokens=4)
    for _ in range(5):
        world.driver.step()

    assert world.driver.tokens(pending) == []
    assert world.driver.core.stats().num_loading == 0
    world.tiers.is_pending = False
    world.driver.run()
    assert world.driver.tokens(pending) == expected
    assert len(world.driver.tokens(other)) == 4
    assert world.driver.cached_tokens(pending) == 96


def test_loads_begin_while_a_long_prefill_takes_the_whole_budget(tiny: Model) -> None:
    world = World.of(tiny, max_batched_tokens=32)
    prompt = prompt_of(100)
    world.store(prompt)
    world.tiers.is_held = True
    world.driver.submit(prompt_of(300, 1), max_tokens=1)
    world.driver.submit(prompt)
    world.driver.step()

    assert world.driver.core.stats().num_loading == 1


def test_requests_with_a_prefix_that_is_loaded_for_another_wait_for_it(world: World) -> None:
    prefix = prompt_of(64)
    world.store(prefix + prompt_of(4, 1))
    world.tiers.is_held = True
    ids = [world.driver.submit([*prefix, *prompt_of(9, seed)]) for seed in range(4)]
    for _ in range(3):
        world.driver.step()

    assert len(world.tiers.running) == 1
    world.tiers.is_held = False
    world.driver.run()
    assert [world.driver.cached_tokens(at) for at in ids] == [64] * 4
    stats = world.driver.core.stats()
    assert (stats.hit_tokens["disk"], stats.hit_tokens["gpu"]) == (64, 3 * 64)


@pytest.mark.parametrize("good_blocks", [0, 1, 5])
@pytest.mark.parametrize("outcome", ["missing", "damaged", "failed", "stopped"])
def test_what_a_load_lacks_is_computed_and_not_asked_for_again(
    world: World, good_blocks: int, outcome: Any
) -> None:
    prompt = prompt_of(100)
    expected = world.store(prompt)
    world.tiers.good_blocks, world.tiers.outcome = good_blocks, outcome
    request_id = world.driver.submit(prompt)
    world.driver.run()

    assert world.driver.tokens(request_id) == expected
    assert world.driver.cached_tokens(request_id) == good_blocks * 16
    asked = [query for query in world.tiers.queries if query.owner.startswith(request_id)]
    assert len(asked) == 1
    stats = world.driver.core.stats()
    assert stats.miss_tokens["failed"] == (6 - good_blocks) * 16
    assert stats.loading_blocks == 0


def test_what_was_computed_after_a_failed_load_is_what_later_requests_hit(world: World) -> None:
    prompt = prompt_of(100)
    expected = world.store(prompt)
    world.tiers.good_blocks = 2
    world.driver.complete(prompt)
    request_id = world.driver.submit(prompt)
    world.driver.run()

    assert world.driver.tokens(request_id) == expected
    assert world.driver.last(request_id).hit_source == "gpu"


@pytest.mark.parametrize("writes_late", [True, False])
def test_an_abort_while_loading_frees_all_but_the_blocks_still_written(
    world: World, writes_late: bool
) -> None:
    prompt = prompt_of(100)
    expected = world.store(prompt)
    world.tiers.is_held, world.tiers.writes_late = True, writes_late
    doomed = world.driver.submit(prompt, n=2)
    world.driver.step()
    world.driver.core.abort(doomed)
    world.driver.check()

    stats = world.driver.core.stats()
    assert (stats.num_loading, stats.active_blocks, stats.loading_blocks) == (0, 0, 6)
    assert [world.driver.last(doomed, at).finish_reason for at in (0, 1)] == ["abort"] * 2
    # The very blocks must not be given to anybody, and nobody may forget them.
    assert not world.driver.core.reset_prefix_cache()
    assert len(world.driver.complete(prompt_of(50, 3))) == 8
    world.tiers.is_held = False
    world.driver.step()
    assert world.driver.core.stats().loading_blocks == 0
    assert world.driver.complete(prompt) == expected


def test_an_abort_while_a_look_up_is_under_way_forgets_it(world: World) -> None:
    world.tiers.is_pending = True
    request_id = world.driver.submit(prompt_of(50))
    world.driver.step()
    world.driver.core.abort(request_id)

    assert [owner.split(".")[0] for owner in world.tiers.cancelled] == [request_id]
    assert not world.driver.core.has_work


def test_an_abort_of_one_sample_lets_the_load_go_on_for_the_others(world: World) -> None:
    prompt = prompt_of(100)
    expected = world.store(prompt)
    world.tiers.is_held = True
    request_id = world.driver.submit(prompt, n=3)
    world.driver.step()
    world.driver.core.abort(request_id, 0)
    world.tiers.is_held = False
    world.driver.run()

    assert world.driver.last(request_id, 0).finish_reason == "abort"
    assert world.driver.tokens(request_id, 2) == expected


def test_a_load_is_not_preempted_and_a_preempted_request_may_load_again(tiny: Model) -> None:
    world = World.of(tiny, pool_tokens=14 * 16)
    prompts = [prompt_of(60, seed) for seed in range(3)]
    expected = [Driver(tiny).complete(prompt, max_tokens=60) for prompt in prompts]
    ids = [world.driver.submit(prompt, max_tokens=60) for prompt in prompts]
    world.driver.run()

    assert [world.driver.tokens(at) for at in ids] == expected
    assert world.driver.core.stats().preemptions_total > 0
    # The pool was too small to keep the preempted ones' blocks: they came back from the tier.
    assert any(query.first_block < query.max_blocks for query in world.tiers.queries)
    assert world.driver.core.stats().loading_blocks == 0


def test_a_running_sample_that_needs_the_room_of_a_load_waits_for_its_end(tiny: Model) -> None:
    world = World.of(tiny, pool_tokens=10 * 16)
    prompt = prompt_of(66)
    expected = world.store(prompt, max_tokens=3)
    world.tiers.is_held = True
    grower = world.driver.submit(prompt_of(50, 1), max_tokens=50)
    world.driver.step()
    loader = world.driver.submit(prompt, max_tokens=3)
    for _ in range(40):
        world.driver.step()

    # The load keeps its five blocks; the sample could take the one left beside its four.
    assert world.driver.core.stats().loading_blocks == 4
    world.tiers.is_held = False
    world.driver.run()
    assert world.driver.tokens(loader) == expected
    assert world.driver.tokens(grower) == Driver(tiny).complete(prompt_of(50, 1), max_tokens=50)


def test_caps_say_what_may_be_stored_and_loaded(world: World) -> None:
    prompt = prompt_of(100)
    world.driver.complete(prompt, max_offload_tokens=40)
    assert len(world.tiers.held) == 2
    assert [at.can_store for at in world.tiers.offered] == [True] * 2 + [False] * 4
    world.forget_pool()

    capped = world.driver.submit(prompt, max_load_tokens=20, max_offload_tokens=0)
    world.driver.run()
    assert world.driver.cached_tokens(capped) == 16
    world.forget_pool()
    forbidden = world.driver.submit(prompt, max_load_tokens=0)
    world.driver.run()
    assert world.driver.cached_tokens(forbidden) == 0
    assert world.driver.core.stats().miss_tokens["gated"] == 16 + 32


def test_a_peer_named_by_the_request_reaches_the_tiers(world: World) -> None:
    source = PeerSource("http://127.0.0.1:9", 64)
    world.driver.complete(prompt_of(100), source=source)

    assert world.tiers.queries[-1].source == source


def test_blocks_are_offered_when_they_become_findable_and_when_they_are_hit(world: World) -> None:
    prompt = prompt_of(40)
    world.driver.complete(prompt, max_tokens=12)
    assert [at.record.depth for at in world.tiers.offered] == [0, 1, 2]
    assert world.tiers.touched == [[at.record.key for at in world.tiers.offered[:2]]]
    world.tiers.offered.clear()
    world.driver.complete(prompt)

    assert [at.record.depth for at in world.tiers.offered] == [0, 1]


def test_restored_blocks_are_offered_too(world: World) -> None:
    prompt = prompt_of(40)
    world.store(prompt)
    world.tiers.offered.clear()
    world.driver.complete(prompt)

    assert [at.record.depth for at in world.tiers.offered] == [0, 1]


def test_every_step_shows_the_tiers_its_size(world: World) -> None:
    world.driver.complete(prompt_of(20), max_tokens=3)

    assert [step[:3] for step in world.tiers.steps] == [(20, 400, 0), (1, 21, 1), (1, 22, 1)]
    assert all(elapsed_s > 0 for *_, elapsed_s in world.tiers.steps)


def test_events_of_the_tier_follow_those_of_the_pool(world: World) -> None:
    prompt = prompt_of(40)
    world.driver.complete(prompt)
    first, *rest = world.driver.events
    assert isinstance(first, BlockStored)
    assert first.medium == "GPU"
    assert [event.medium for event in rest if isinstance(event, BlockStored)] == ["STORAGE"] * 2
    world.forget_pool()
    removed = [event for event in world.driver.events if isinstance(event, BlockRemoved)]
    assert {event.medium for event in removed} == {"STORAGE"}
    world.driver.events.clear()

    world.driver.complete(prompt)
    restored = world.driver.events[0]
    assert isinstance(restored, BlockStored)
    assert (restored.medium, restored.block_hashes) == ("GPU", first.block_hashes)


def test_a_reset_clears_the_tiers_too_unless_it_is_refused(world: World) -> None:
    world.driver.complete(prompt_of(40))
    request_id = world.driver.submit(prompt_of(40))
    world.driver.step()
    assert not world.driver.core.reset_prefix_cache()
    assert world.tiers.num_clears == 0
    world.driver.core.abort(request_id)
    assert world.driver.core.reset_prefix_cache()

    assert (world.tiers.num_clears, world.tiers.held) == (1, {})


def test_damaged_books_leave_blocks_that_are_still_written_out_of_use(world: World) -> None:
    prompt = prompt_of(100)
    world.store(prompt)
    world.tiers.is_held = True
    loading = world.driver.submit(prompt)
    running = world.driver.submit(prompt_of(20, 1))
    world.driver.step()
    blocks = next(iter(world.tiers.running.values())).blocks
    world.driver.core._pool._books.references[0] += 1
    with pytest.raises(AssertionError):
        world.driver.core.check()
    world.driver.core.start_over(RuntimeError("books are damaged"))
    world.driver.core._publish_events()
    world.driver.check()

    for request_id in (loading, running):
        assert "books are damaged" in (world.driver.last(request_id).error or "")
    stats = world.driver.core.stats()
    assert (stats.loading_blocks, stats.free_blocks) == (6, stats.pool_blocks - 6)
    assert world.tiers.num_clears == 2
    free = world.driver.core._pool.allocate(stats.free_blocks)
    assert not {*blocks} & {*(free or [])}
    world.driver.core._pool.release(free or [], world.tiers.queries[-1].chain)
    world.tiers.held = {}
    world.tiers.good_blocks = 0
    world.tiers.writes_late = False
    world.tiers.is_held = False
    world.driver.step()
    assert world.driver.core.stats().free_blocks == stats.pool_blocks
    assert len(world.driver.complete([5, 6, 7])) == 8


def test_misses_have_reasons_that_add_up(tiny: Model) -> None:
    world = World.of(tiny, pool_tokens=8 * 16)
    world.tiers.stores = False
    prompt = prompt_of(100)
    world.driver.complete(prompt, max_tokens=1)
    world.driver.complete(prompt_of(100, 1), max_tokens=1)
    world.driver.complete(prompt, max_tokens=1)

    stats = world.driver.core.stats()
    assert stats.hit_tokens["gpu"] == 16, "one block of the first prompt was left"
    assert stats.miss_tokens == {
        "cold": 2 * 96,
        "evicted": 80,
        "below_block": 3 * 4,
        "gated": 0,
        "failed": 0,
    }
    world.tiers.stores, world.tiers.is_worth_it = True, False
    world.driver.complete(prompt, max_tokens=1)
    world.forget_pool()
    world.driver.complete(prompt, max_tokens=1)
    assert world.driver.core.stats().miss_tokens["gated"] == 96


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_over_failing_tiers_gives_everyone_the_tokens_it_gets_alone(
    tiny: Model, seed: int
) -> None:
    rng = random.Random(seed)
    world = World.of(tiny, pool_tokens=18 * 16, max_batched_tokens=48, max_seqs=6)
    driver, tiers = world.driver, world.tiers
    expected: dict[str, tuple[list[int], int]] = {}
    aborted = set()
    for _ in range(80):
        tiers.is_held = rng.random() < 0.5
        tiers.is_pending = rng.random() < 0.2
        tiers.good_blocks = rng.choice([None, None, 0, 1, 3])
        tiers.most_blocks = rng.choice([1, 2, 100])
        if rng.random() < 0.3:
            prompt = prompt_of(rng.choice([16, 40, 64]), rng.randrange(2)) + prompt_of(
                rng.randrange(30), rng.randrange(3)
            )
            length = rng.randrange(1, 30)
            request_id = driver.submit(prompt, max_tokens=length, n=rng.choice([1, 1, 3]))
            expected[request_id] = (prompt, length)
        if expected and rng.random() < 0.08:
            victim = rng.choice(list(expected))
            driver.core.abort(victim)
            aborted.add(victim)
            driver.check()
        driver.step()
    tiers.is_held = tiers.is_pending = False
    driver.run()

    stats = driver.core.stats()
    assert (stats.active_blocks, stats.loading_blocks, stats.num_waiting) == (0, 0, 0)
    assert stats.hit_tokens["disk"] > 0
    alone = Driver(tiny)
    for request_id, (prompt, length) in expected.items():
        if request_id not in aborted:
            assert driver.tokens(request_id) == alone.complete(prompt, max_tokens=length)
