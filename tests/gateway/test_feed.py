"""A worker's events are believed as long as they make sense, and it is said when they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.fleet.event_health import (
    MAX_BARREN_BATCHES,
    MAX_OVERCLAIMS,
    MAX_SILENCE_S,
    MAX_UNSEEN_PROMPTS,
    SHOW_ERROR_S,
    TRIAL_AFTER_S,
    EventHealth,
)
from prefix_index import AllBlocksCleared, BlockRemoved, root_hash
from prefix_index.events import Event
from tests.gateway.feed_parts import OURS, TOKENS, Fed, fed, stored
from tests.gateway.routing_parts import BLOCK


async def test_events_that_make_sense_are_believed() -> None:
    async with fed() as worker:
        assert worker.health() is EventHealth.WAITING

        worker.take(stored(0, 3))
        worker.feed.subscriber.last_event_s = worker.clock.now_s

        assert (worker.hit, worker.mode()) == (3, "exact")
        assert worker.health() is EventHealth.OK


async def test_a_worker_that_was_given_new_prompts_and_stays_silent_is_modelled() -> None:
    async with fed() as worker:
        worker.take(stored(0, 3))
        worker.passes(1000)
        assert worker.mode() == "exact"  # nothing was due

        worker.feed.saw_new_prompt(1.0)
        worker.passes(MAX_SILENCE_S / 2)
        worker.feed.saw_new_prompt(1.0)
        assert worker.feed.lag_s == MAX_SILENCE_S / 2
        assert worker.mode() == "exact"

        worker.passes(MAX_SILENCE_S / 2)
        assert (worker.mode(), worker.health()) == ("approximate", EventHealth.SILENT)
        assert worker.hit == 0

        worker.take(stored(3, 4))
        assert worker.mode() == "exact"
        worker.take(stored(0, 2))
        assert worker.hit == 2


async def test_a_worker_that_announced_a_prompt_while_it_answered_owes_nothing() -> None:
    async with fed() as worker:
        worker.passes(5)
        worker.take(stored(0, 3))
        worker.passes(30)  # its tokens went on long after its prompt's events
        worker.feed.saw_new_prompt(32.0)
        worker.passes(1000)

        assert (worker.hit, worker.mode(), worker.feed.lag_s) == (3, "exact", 0.0)


async def test_three_messages_in_a_row_that_nobody_understands_make_it_approximate() -> None:
    async with fed() as worker:
        worker.take(stored(0, 3))
        subscriber = worker.feed.subscriber
        for number in range(1, 4):
            assert worker.mode() == "exact"
            subscriber._deliver(number, b"\xc1")
            worker.passes(0)
            assert worker.health() is EventHealth.UNDECODABLE

        assert worker.mode() == "approximate"
        assert subscriber.decode_errors == 3

        worker.take()  # a batch of nothing shows nothing
        assert worker.mode() == "approximate"
        worker.take(BlockRemoved([1]))
        assert worker.mode() == "exact"


async def test_one_message_that_nobody_understands_is_shown_for_a_while() -> None:
    async with fed() as worker:
        worker.take(stored(0, 3))
        worker.feed.subscriber._deliver(1, b"\xc1")
        worker.passes(SHOW_ERROR_S - 1)
        assert worker.health() is EventHealth.UNDECODABLE
        worker.passes(1)
        assert worker.health() is EventHealth.OK
        assert worker.hit == 3


async def test_events_that_never_yield_a_block_are_not_an_empty_cache() -> None:
    async with fed() as worker:
        for _ in range(MAX_BARREN_BATCHES):
            assert worker.mode() == "exact"
            worker.take(stored(4, 5))  # continues what was never announced

        assert (worker.mode(), worker.health()) == ("approximate", EventHealth.USELESS)

        worker.take(stored(4, 5))
        assert worker.mode() == "approximate"
        worker.take(stored(0, 1))
        assert worker.mode() == "exact"
        worker.take(stored(0, 1))
        assert worker.hit == 1


LIES: dict[str, Callable[[int], Event]] = {
    "fewer hashes than tokens": lambda at: stored(0, 3, block_hashes=[100 + at]),
    "more hashes than tokens": lambda at: stored(0, 1, block_hashes=[100 + at, 200 + at]),
    "no hashes": lambda at: stored(0, 1, block_hashes=[]),
    "another block size than before": lambda at: stored(
        0, 2, block_hashes=[100 + at], block_size=2 * BLOCK
    ),
    "smaller blocks than before": lambda at: stored(
        0, 1, block_hashes=[100 + at, 200 + at], block_size=BLOCK // 2
    ),
    "a block size of none": lambda at: stored(0, 1, block_size=0),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_worker_that_keeps_contradicting_itself_is_modelled_until_it_restarts(
    lie: Callable[[int], Event],
) -> None:
    async with fed() as worker:
        other = worker.pool.index
        assert other is not None
        other.store("w1", OURS[:4], root_hash("m"))
        worker.take(stored(0, 3))
        worker.take(lie(0))
        worker.take(lie(1))
        assert (worker.hit, worker.mode()) == (3, "exact")

        worker.take(lie(2))
        assert (worker.mode(), worker.health()) == ("approximate", EventHealth.IMPLAUSIBLE)
        assert other.num_blocks == 4  # nobody else lost anything

        worker.take(stored(0, 3))
        assert worker.mode() == "approximate"

        worker.feed.new_epoch()
        worker.take(stored(0, 2))
        worker.take(stored(0, 2))
        assert (worker.hit, worker.mode()) == (2, "exact")


async def test_what_nothing_can_disprove_gets_another_trial_after_a_while() -> None:
    async with fed() as worker:
        worker.take(stored(0, 3))
        for at in range(3):
            worker.take(LIES["no hashes"](at))
        worker.passes(TRIAL_AFTER_S - 1)
        assert worker.mode() == "approximate"
        worker.passes(1)
        assert worker.mode() == "exact"
        worker.take(stored(0, 3))
        assert worker.hit == 3


async def test_an_unfinished_block_is_no_lie() -> None:
    async with fed() as worker:
        worker.take(stored(0, 3))
        for at in range(20):
            worker.take(stored(3, 4, block_hashes=[50 + at], token_ids=TOKENS[:5], block_size=5))

        assert (worker.hit, worker.mode()) == (3, "exact")
        assert (worker.feed.ingest.partial, worker.feed.ingest.rejected) == (20, 0)


async def send_prompts(worker: Fed, number: int, *, is_salted: bool) -> None:
    for at in range(number):
        root = b"prompt %d %d" % (at, is_salted)
        worker.feed.saw_prompt(root.ljust(16), is_salted=is_salted)
        worker.take(stored(0, 1))


@pytest.mark.parametrize(
    ("is_salted", "word"), [(True, EventHealth.WITHOUT_SALT), (False, EventHealth.MISMATCH)]
)
async def test_events_of_other_blocks_than_our_prompts_have_are_not_believed(
    is_salted: bool, word: EventHealth
) -> None:
    async with fed() as worker:
        worker.take(stored(0, 3))
        await send_prompts(worker, MAX_UNSEEN_PROMPTS - 1, is_salted=is_salted)
        worker.passes(MAX_SILENCE_S)
        assert worker.mode() == "exact"
        # One that is announced as it was sent shows that the others had reasons of their own.
        worker.feed.saw_prompt(OURS[3], is_salted=is_salted)
        worker.take(stored(3, 4))
        await send_prompts(worker, MAX_UNSEEN_PROMPTS - 1, is_salted=is_salted)
        worker.passes(MAX_SILENCE_S)
        assert worker.mode() == "exact"

        await send_prompts(worker, 1, is_salted=is_salted)
        worker.passes(MAX_SILENCE_S)
        assert (worker.mode(), worker.health()) == ("approximate", word)


async def test_salted_prompts_are_believed_again_once_an_event_has_a_salt() -> None:
    async with fed() as worker:
        await send_prompts(worker, MAX_UNSEEN_PROMPTS, is_salted=True)
        worker.passes(MAX_SILENCE_S)
        assert worker.health() is EventHealth.WITHOUT_SALT
        worker.take(stored(0, 1))
        worker.take(stored(0, 1, lora_id=1, lora_name="ad1", extra_keys=[["ad1"]]))
        assert worker.mode() == "approximate"

        worker.take(stored(0, 1, extra_keys=[["tenant-a"]]))
        assert worker.mode() == "exact"


async def test_a_worker_that_keeps_reporting_less_than_its_events_claim_is_modelled() -> None:
    async with fed() as worker:
        worker.take(stored(0, 3))
        for _ in range(2):
            for _ in range(MAX_OVERCLAIMS - 1):
                worker.feed.saw_hit(predicted_tokens=1000, observed_tokens=499)
            # One answer as expected, and the ones before were evictions.
            worker.feed.saw_hit(predicted_tokens=1000, observed_tokens=500)
        assert worker.mode() == "exact"
        for _ in range(MAX_OVERCLAIMS):
            worker.feed.saw_hit(predicted_tokens=0, observed_tokens=0)
        assert worker.mode() == "exact"  # nothing was claimed

        for _ in range(MAX_OVERCLAIMS):
            worker.feed.saw_hit(predicted_tokens=1000, observed_tokens=0)
        assert (worker.mode(), worker.health()) == ("approximate", EventHealth.OVERCLAIM)
        worker.take(stored(0, 3))
        assert worker.mode() == "approximate"


async def test_events_of_another_rank_are_not_this_ranks_blocks() -> None:
    async with fed(rank=1) as worker:
        worker.take(stored(0, 3), rank=0)

        assert (worker.hit, worker.mode()) == (0, "approximate")
        assert (worker.health(), worker.feed.misdirected) == (EventHealth.WRONG_RANK, 1)

        worker.take(stored(0, 3), rank=1)
        assert worker.mode() == "exact"
        worker.take(stored(0, 3), rank=1)
        assert worker.hit == 3


async def test_nothing_of_all_that_makes_a_diverged_worker_readable() -> None:
    async with fed() as worker:
        worker.pool.set_mode(worker.worker, "text")
        for at in range(5):
            worker.take(LIES["no hashes"](at), stored(0, 1))
        worker.feed.saw_new_prompt(1.0)
        worker.passes(MAX_SILENCE_S)

        assert (worker.mode(), worker.hit) == ("text", 0)


async def test_a_reset_through_us_clears_at_once_and_its_late_event_clears_no_more() -> None:
    async with fed() as worker:
        worker.take(stored(0, 3))
        worker.feed.forget()
        assert worker.hit == 0

        worker.take(AllBlocksCleared(), stored(0, 2))
        assert worker.hit == 2


async def test_a_doubt_is_told_to_whoever_copies_the_index() -> None:
    async with fed() as worker:
        changes: list[Any] = []
        worker.feed.ingest.on_change = changes.append
        worker.take(stored(0, 1))
        for at in range(3):
            worker.take(LIES["no hashes"](at))

        assert [change.cleared for change in changes] == [False, True]
