from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.tiers.admission import NEARLY_FULL, Admission
from runner.tiers.reuse import ReuseHistory
from runner.tiers.types import BlockRecord, TierName
from tests.runner.gain_parts import BLOCK_BYTES, Lab, Speed

QUICK = Speed(5e9, 100e-6)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def record(number: int, depth: int = 50) -> BlockRecord:
    return BlockRecord(key(number), key(number - 1), b"", depth)


class Desk:
    """Admission to one disk whose speed is known."""

    def __init__(self, token_s: float = 1e-3, read: Speed = QUICK, write: Speed = QUICK) -> None:
        self.lab = Lab(token_s, {"disk": read})
        for _ in range(20):
            self.lab.transfer("disk", 16)
            num_bytes = 16 * BLOCK_BYTES
            self.lab.transfers.observe("disk", "write", num_bytes, write.transfer_s(num_bytes))
        self.history = ReuseHistory()
        self.admission = Admission(self.lab.pricing, self.history)
        # The trial of this interval has been made.
        self.admission.worth_storing("disk", record(10**6), 1, 0.5, 10**15, self.lab.now_s)

    def takes(
        self,
        number: int = 1,
        *,
        depth: int = 50,
        touches: int = 1,
        fullness: float = 0.5,
        queued_bytes: int = 0,
        tier: TierName = "disk",
    ) -> bool:
        return self.admission.worth_storing(
            tier, record(number, depth), touches, fullness, queued_bytes, self.lab.now_s
        )

    def unused(self, count: int, *, depth: int = 50) -> None:
        """Blocks that were offered and that nobody asked for again."""
        for number in range(10_000, 10_000 + count):
            self.takes(number, depth=depth)
        self.lab.now_s += 301
        # Settles their fate, and is this interval's trial.
        self.takes(10**6 + 1, queued_bytes=10**15)


def test_a_block_is_stored_while_there_is_room() -> None:
    assert Desk().takes()


def test_a_nearly_full_tier_takes_only_what_was_asked_for_twice() -> None:
    desk = Desk()

    assert desk.takes(touches=1, fullness=NEARLY_FULL)
    assert not desk.takes(touches=1, fullness=NEARLY_FULL + 0.01)
    assert desk.takes(touches=2, fullness=NEARLY_FULL + 0.01)


@pytest.mark.parametrize("depth", [0, 3])
def test_the_first_blocks_of_a_conversation_are_stored_though_such_rarely_come_back(
    depth: int,
) -> None:
    desk = Desk(token_s=1e-4, read=Speed(5e9), write=Speed(50e6))
    desk.unused(3000, depth=depth)
    desk.unused(3000, depth=50)
    slow = Desk(token_s=1e-3, read=Speed(5e9), write=Speed(500e6))
    slow.unused(3000, depth=depth)
    slow.unused(3000, depth=50)

    assert slow.takes(depth=depth)
    assert not slow.takes(depth=50)
    # But not where writing costs more than it could ever save.
    assert not desk.takes(depth=depth)


def test_traffic_without_reuse_stops_being_stored_and_reuse_brings_it_back() -> None:
    desk = Desk(write=Speed(1e9))
    assert desk.takes(1)

    desk.unused(2000)
    assert not desk.takes(2)

    for number in range(1000):
        desk.takes(20_000 + number)
        desk.history.touched([key(20_000 + number)])
    assert desk.takes(3)


def test_a_tier_that_reads_more_slowly_than_prefill_gets_nothing() -> None:
    assert not Desk(token_s=1e-4, read=Speed(10e6)).takes(touches=5)


def test_a_tier_never_used_gets_something_to_be_measured_with() -> None:
    assert Desk().takes(tier="remote")


@pytest.mark.parametrize(("read", "write"), [(Speed(10e6), QUICK), (QUICK, Speed(1e6))])
def test_a_tier_not_worth_it_gets_one_block_every_ten_seconds_to_be_seen_again(
    read: Speed, write: Speed
) -> None:
    desk = Desk(token_s=1e-4, read=read, write=write)
    taken = 0
    for number in range(1, 601):
        desk.lab.now_s += 0.1
        taken += desk.takes(number)

    assert 5 <= taken <= 6


def test_a_nearly_full_tier_gets_no_trial() -> None:
    desk = Desk(token_s=1e-4, read=Speed(10e6))
    desk.lab.now_s += 1000

    assert not desk.takes(fullness=0.95)


def test_a_long_write_queue_raises_the_price() -> None:
    desk = Desk(token_s=1e-4, write=Speed(20e9))

    assert desk.takes(touches=3)
    assert not desk.takes(touches=3, queued_bytes=20_000_000_000)


def test_depths_and_touches_are_learned_apart() -> None:
    history = ReuseHistory()
    for number in range(1000):
        history.offered(key(number), 0, 1, 0.0)
        history.offered(key(100_000 + number), 100, 1, 0.0)
        history.offered(key(200_000 + number), 100, 2, 0.0)
    history.touched(key(number) for number in range(1000))
    history.touched(key(200_000 + number) for number in range(500))
    history.offered(key(1), 1, 1, 301.0)

    assert history.likelihood(0, 1) > 0.95
    assert history.likelihood(100, 1) < 0.05
    assert history.likelihood(100, 2) == pytest.approx(0.5, abs=0.05)
    assert history.likelihood(0, 3) == pytest.approx(0.3)


def test_a_block_counts_once_for_each_time_it_was_offered() -> None:
    history = ReuseHistory()
    for _ in range(50):
        history.offered(key(1), 0, 1, 0.0)
    for _ in range(50):
        history.touched([key(1)])

    assert history.likelihood(0, 1) == pytest.approx((1 + 0.3 * 20) / (1 + 20))


def test_a_working_set_that_has_gone_round_once_is_not_taken_for_no_reuse() -> None:
    desk = Desk(write=Speed(1e9))

    assert all(desk.takes(number, depth=number % 64) for number in range(1, 3000))


def test_a_block_asked_for_late_was_reused_after_all() -> None:
    history = ReuseHistory()
    for number in range(1000):
        history.offered(key(number), 10, 1, 0.0)
    assert history.likelihood(10, 1) == pytest.approx(0.3)
    history.offered(key(5000), 0, 9, 301.0)
    assert history.likelihood(10, 1) < 0.01
    history.touched(key(number) for number in range(1000))

    assert history.likelihood(10, 1) > 0.95


def test_what_became_true_lately_outweighs_what_was() -> None:
    history = ReuseHistory()
    for number in range(20_000):
        history.offered(key(number), 10, 1, 0.0)
    for number in range(20_000, 26_000):
        history.offered(key(number), 10, 1, 0.0)
        history.touched([key(number)])

    assert history.likelihood(10, 1) > 0.6


def test_the_ghost_list_is_bounded_and_forgets_the_oldest() -> None:
    history = ReuseHistory(max_ghosts=100)
    for number in range(1000):
        history.offered(key(number), 10, 1, 0.0)

    before = history.likelihood(10, 1)
    assert before < 0.02
    history.touched(key(number) for number in range(900))
    assert history.likelihood(10, 1) == before
    history.touched([key(999)])
    assert history.likelihood(10, 1) > before
    assert len(history._ghosts) == 99


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 10**6), st.integers(0, 100), st.booleans()),
        max_size=200,
    )
)
def test_a_likelihood_is_always_a_share(seen: list[tuple[int, int, int, bool]]) -> None:
    history = ReuseHistory(max_ghosts=20)
    for number, depth, touches, is_touch in seen:
        if is_touch:
            history.touched([key(number)])
        else:
            history.offered(key(number), depth, touches, 0.0)
        assert 0 <= history.likelihood(depth, touches) <= 1
