"""Following a publisher over real sockets: nothing twice, nothing missing, or it says so."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from prefix_index import (
    BlockStored,
    EventBatch,
    Hit,
    Index,
    WorkerFeed,
    encode_batch,
    hash_blocks,
    root_hash,
)
from prefix_index import replay as replay_module
from prefix_index import subscriber as subscriber_module
from prefix_index.events import MAX_PAYLOAD_BYTES
from prefix_index.subscriber import EventSubscriber
from tests.prefix_index.publisher import Publisher
from tests.support import free_port, poll_until

B = 4
_stamps = itertools.count(1)


def batch(block: int) -> bytes:
    """Return the payload that stores one block of a chain whose engine hashes are 1, 2, ..."""
    tokens = list(range(block * B, (block + 1) * B))
    event = BlockStored([block + 1], block or None, tokens, B, medium="GPU")
    # Two batches of a real engine never have the same time.
    return encode_batch(EventBatch(float(next(_stamps)), [event], 0))


def chain(num_blocks: int) -> list[bytes]:
    return hash_blocks(list(range(num_blocks * B)), B, root_hash("m"))


class Follower:
    """A subscriber with a feed, and a log of what it was told."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, **more: Any) -> None:
        self.index = Index(B)
        self.feed = WorkerFeed(self.index, "w", "m")
        self.log: list[int | str] = []
        self.subscriber = EventSubscriber(
            endpoint,
            replay_endpoint,
            on_batch=self._batch,
            on_clear=self._clear,
            topic="kv@",
            **more,
        )

    @property
    def sequences(self) -> list[int]:
        return [entry for entry in self.log if isinstance(entry, int)]

    @property
    def clears(self) -> list[str]:
        return [entry for entry in self.log if isinstance(entry, str)]

    def hit(self) -> int:
        return self.index.match(chain(40)).get("w", Hit()).total // B

    async def reaches(self, condition: Callable[[], bool]) -> None:
        await poll_until(condition, what=str(self.log))

    def _batch(self, sequence: int, events: EventBatch) -> None:
        self.log.append(sequence)
        self.feed.apply(events)

    def _clear(self, reason: str) -> None:
        self.log.append(reason)
        self.feed.clear()


@asynccontextmanager
async def following(
    publisher: Publisher, replay: bool = True, **more: Any
) -> AsyncIterator[Follower]:
    follower = Follower(publisher.endpoint, publisher.replay_endpoint if replay else None, **more)
    task = asyncio.create_task(follower.subscriber.run())
    try:
        yield follower
        assert not task.done(), task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "_TIMEOUT_S", 0.3)


def ports() -> tuple[int, int]:
    return free_port(), free_port()


async def test_what_was_published_before_and_after_the_start_arrives_once_and_in_order() -> None:
    async with Publisher(*ports()) as publisher:
        for block in range(5):
            await publisher.publish(batch(block), live=False)
        async with following(publisher) as follower:
            await publisher.subscribed()
            for block in range(5, 9):
                await publisher.publish(batch(block))
            await follower.reaches(lambda: follower.hit() == 9)

            assert follower.log == list(range(9))
            assert follower.subscriber.last_sequence == 8
            assert follower.subscriber.last_event_s is not None
            assert follower.subscriber.gaps == follower.subscriber.decode_errors == 0


async def test_batches_that_come_live_and_by_replay_are_applied_once() -> None:
    async with Publisher(*ports()) as publisher:
        publisher.answers = False
        async with following(publisher) as follower:
            await publisher.subscribed()
            # Sent while the first question is still open, then asked for again with batch 5.
            for block in range(5):
                await publisher.publish(batch(block), live=block != 1)
            publisher.answers = True
            await publisher.publish(batch(5))
            await follower.reaches(lambda: follower.hit() == 6)

            assert follower.log == list(range(6))


@pytest.mark.parametrize("old", [True, False], ids=["three parts", "four parts"])
async def test_a_gap_is_filled_by_replay(old: bool) -> None:
    async with Publisher(*ports(), old=old) as publisher, following(publisher) as follower:
        await publisher.subscribed()
        await publisher.publish(batch(0))
        await publisher.publish(batch(1))
        await follower.reaches(lambda: follower.hit() == 2)
        for block in (2, 3, 4):
            await publisher.publish(batch(block), live=False)
        await publisher.publish(batch(5))
        await follower.reaches(lambda: follower.hit() == 6)
        await publisher.publish(batch(6))
        await follower.reaches(lambda: follower.hit() == 7)

        assert follower.log == list(range(7))
        assert follower.subscriber.gaps == 1


async def test_a_gap_that_nobody_can_fill_clears() -> None:
    async with Publisher(*ports()) as publisher, following(publisher) as follower:
        await publisher.subscribed()
        await publisher.publish(batch(0))
        await follower.reaches(lambda: follower.hit() == 1)
        publisher.answers = False
        publisher.sequence = 4
        await publisher.publish(batch(0))
        await follower.reaches(lambda: follower.sequences == [0, 4])

        assert follower.clears == ["batches 1 to 3 are lost"]
        assert follower.subscriber.gaps == 1
        assert follower.hit() == 1


async def test_without_a_replay_endpoint_every_gap_clears() -> None:
    async with Publisher(*ports()) as publisher, following(publisher, replay=False) as follower:
        await publisher.subscribed()
        await publisher.publish(batch(0))
        await publisher.publish(batch(1), live=False)
        await publisher.publish(batch(2))
        await follower.reaches(lambda: follower.sequences == [0, 2])

        assert follower.clears == ["batches 1 to 1 are lost"]
        assert follower.hit() == 0
        assert follower.feed.waiting == 1


async def test_a_buffer_that_moved_on_clears_and_gives_what_it_still_has() -> None:
    async with Publisher(*ports()) as publisher, following(publisher) as follower:
        await publisher.subscribed()
        await publisher.publish(batch(0))
        await follower.reaches(lambda: follower.hit() == 1)
        for block in range(1, 6):
            await publisher.publish(batch(block), live=False)
        del publisher.buffer[:3]
        await publisher.publish(batch(6))
        await follower.reaches(lambda: follower.sequences == [0, 3, 4, 5, 6])

        assert follower.clears
        assert follower.hit() == 0
        assert follower.feed.waiting == 4


async def test_a_publisher_whose_sequence_starts_again_is_a_new_epoch() -> None:
    first, second = ports()
    async with Publisher(first, second) as publisher:
        for block in range(3):
            await publisher.publish(batch(block), live=False)
        async with following(publisher) as follower:
            await publisher.subscribed()
            await follower.reaches(lambda: follower.hit() == 3)
            publisher.sequence = 0
            publisher.buffer.clear()
            await publisher.publish(batch(0))
            await follower.reaches(lambda: len(follower.log) == 5)

            assert follower.log == [0, 1, 2, "sequence started again", 0]
            assert follower.hit() == 1


async def test_a_restart_that_was_overtaken_unseen_is_no_mere_gap() -> None:
    async with Publisher(*ports()) as publisher:
        for block in range(3):
            await publisher.publish(batch(block), live=False)
        async with following(publisher) as follower:
            await publisher.subscribed()
            await follower.reaches(lambda: follower.hit() == 3)
            # The new process has already sent more than the old one when it is heard again.
            publisher.sequence = 0
            publisher.buffer.clear()
            for block in range(6):
                await publisher.publish(batch(block), live=False)
            await publisher.publish(batch(6))
            await follower.reaches(lambda: follower.sequences[3:] == list(range(7)))

            assert len(follower.clears) == 1
            assert follower.hit() == 7


async def test_a_publisher_that_dies_and_returns_on_its_address_is_followed_again() -> None:
    address = ports()
    async with following(Publisher(*address)) as follower:
        async with Publisher(*address) as first:
            await first.subscribed()
            await first.publish(batch(0))
            await follower.reaches(lambda: follower.hit() == 1)
        async with Publisher(*address) as second:
            await second.subscribed()
            for block in range(2):
                await second.publish(batch(block))
            await follower.reaches(lambda: follower.hit() == 2)

            assert len(follower.clears) == 1


async def test_a_silent_restart_is_noticed_when_nothing_was_heard_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscriber_module, "_IDLE_CHECK_S", 0.1)
    async with Publisher(*ports()) as publisher:
        for block in range(3):
            await publisher.publish(batch(block), live=False)
        async with following(publisher) as follower:
            await follower.reaches(lambda: len(publisher.questions) > 3)

            assert follower.log == [0, 1, 2]

            publisher.buffer.clear()
            publisher.sequence = 0
            await publisher.publish(batch(0), live=False)
            await follower.reaches(lambda: follower.hit() == 1)

            assert follower.log[4:] == [0]


async def test_a_batch_lost_before_the_subscription_is_found_by_asking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscriber_module, "_IDLE_CHECK_S", 0.1)
    async with Publisher(*ports()) as publisher, following(publisher) as follower:
        await publisher.subscribed()
        await follower.reaches(lambda: len(publisher.questions) > 1)
        await publisher.publish(batch(0), live=False)
        await follower.reaches(lambda: follower.hit() == 1)

        assert follower.log == [0]


async def test_a_declared_new_epoch_clears_at_once_and_replays_from_0() -> None:
    async with Publisher(*ports()) as publisher:
        for block in range(3):
            await publisher.publish(batch(block), live=False)
        async with following(publisher) as follower:
            await follower.reaches(lambda: follower.hit() == 3)
            follower.subscriber.restart()

            assert follower.clears == ["new epoch"]
            assert follower.hit() == 0

            await follower.reaches(lambda: follower.hit() == 3)

            assert follower.log == [0, 1, 2, "new epoch", 0, 1, 2]


async def test_a_new_epoch_declared_during_a_replay_replaces_it() -> None:
    async with Publisher(*ports()) as publisher:
        for block in range(3):
            await publisher.publish(batch(block), live=False)
        async with following(publisher) as follower:
            await follower.reaches(lambda: follower.hit() == 3)
            publisher.answers = False
            publisher.sequence = 7
            await publisher.publish(batch(7), kept=False)
            await follower.reaches(lambda: 2 in publisher.questions)
            follower.subscriber.restart()
            publisher.answers = True
            await follower.reaches(lambda: follower.hit() == 3)

            assert follower.log == [0, 1, 2, "new epoch", 0, 1, 2]


async def a_known_beginning(publisher: Publisher) -> dict[str, Any]:
    """Let somebody follow three batches; return where he stopped."""
    for block in range(3):
        await publisher.publish(batch(block), live=False)
    async with following(publisher) as first:
        await first.reaches(lambda: first.hit() == 3)
        assert first.subscriber.last_sequence == 2
        return {"first_sequence": 3, "last_digest": first.subscriber.last_digest}


async def test_who_knows_the_beginning_goes_on_behind_it() -> None:
    async with Publisher(*ports()) as publisher:
        known = await a_known_beginning(publisher)
        await publisher.publish(batch(3), live=False)
        async with following(publisher, **known) as second:
            await second.reaches(lambda: second.log == [3])
            await publisher.publish(batch(4))
            await second.reaches(lambda: second.log == [3, 4])


async def test_who_knows_another_beginning_clears_and_starts_over() -> None:
    async with Publisher(*ports()) as publisher:
        known = await a_known_beginning(publisher)
        async with following(publisher, **{**known, "last_digest": 1}) as second:
            await second.reaches(lambda: second.hit() == 3)

            assert len(second.clears) == 1
            assert second.sequences == [0, 1, 2]


async def test_who_knows_a_beginning_that_is_out_of_the_buffer_clears_and_takes_the_rest() -> None:
    async with Publisher(*ports()) as publisher:
        known = await a_known_beginning(publisher)
        del publisher.buffer[:]
        publisher.sequence = 7
        await publisher.publish(batch(0), live=False)
        async with following(publisher, **known) as second:
            await second.reaches(lambda: second.hit() == 1)

            assert second.clears
            assert second.sequences == [7]


GARBAGE = {
    "no batch": b"\xc1\xff",
    "no payload": b"",
    "a batch of no events": b"\x93\x01\x91\x05\x00",
    "a larger batch than any engine means": bytes(MAX_PAYLOAD_BYTES + 1),
}


@pytest.mark.parametrize("payload", GARBAGE.values(), ids=GARBAGE)
async def test_a_payload_that_is_no_batch_is_counted_and_the_next_one_taken(
    payload: bytes,
) -> None:
    async with Publisher(*ports()) as publisher, following(publisher) as follower:
        await publisher.subscribed()
        await publisher.publish(payload)
        await publisher.publish(batch(0))
        await follower.reaches(lambda: follower.hit() == 1)

        assert follower.sequences[-1] == 1
        assert follower.subscriber.decode_errors == 1
        assert follower.subscriber.last_error_s is not None
        assert follower.subscriber.num_undecodable == 0
        assert follower.subscriber.gaps == 0
        assert not follower.clears


async def test_events_from_the_future_are_counted_and_their_neighbours_taken() -> None:
    events = [
        {"type": "BlockMoved", "to": 1},
        ["BlockMoved", 1],
        BlockStored([1], None, [0] * B, B),
    ]
    async with Publisher(*ports()) as publisher, following(publisher) as follower:
        await publisher.subscribed()
        await publisher.publish(msgspec.msgpack.encode([1.0, events, 0]))
        await follower.reaches(lambda: follower.feed.stored == 1)

        assert follower.subscriber.unknown_events == 2
        assert follower.subscriber.decode_errors == 0


FRAMES = {
    "one part": (),
    "no sequence": (batch(0),),
    "a short sequence": (b"\x00" * 4, batch(0)),
    "a long sequence": (b"\x00" * 9, batch(0)),
    "five parts": (b"\x00" * 8, b"", b"\x00" * 8, batch(0)),
}


@pytest.mark.parametrize("parts", FRAMES.values(), ids=FRAMES)
async def test_a_message_of_another_shape_is_counted_and_the_next_one_taken(
    parts: tuple[bytes, ...],
) -> None:
    async with Publisher(*ports()) as publisher, following(publisher) as follower:
        await publisher.subscribed()
        await publisher.send(*parts)
        await publisher.publish(batch(0))
        await follower.reaches(lambda: follower.hit() == 1)

        assert follower.log == [0]
        assert follower.subscriber.decode_errors == 1


async def test_a_publisher_that_appears_later_is_followed_from_its_first_batch() -> None:
    port, replay_port = ports()
    late = Publisher(port, replay_port)
    async with following(late) as follower:
        # The first question finds nobody.
        await asyncio.sleep(0.5)

        assert follower.log == []

        async with late:
            await late.publish(batch(0), live=False)
            await late.subscribed()
            await late.publish(batch(1))
            await follower.reaches(lambda: follower.hit() == 2)

            assert follower.log == [0, 1]


async def test_a_flood_of_batches_lets_other_tasks_run() -> None:
    async with Publisher(*ports()) as publisher:
        for _ in range(3000):
            await publisher.publish(batch(0), live=False)
        async with following(publisher) as follower:
            turns_during_flood = 0
            while len(follower.log) < 3000:
                await asyncio.sleep(0)
                if follower.log:
                    turns_during_flood += 1

            assert turns_during_flood > 20


async def test_only_the_topic_that_was_asked_for_is_taken() -> None:
    async with Publisher(*ports(), topic=b"other") as publisher, following(publisher) as follower:
        await publisher.subscribed()
        await publisher.publish(batch(0), kept=False)
        publisher.topic = b"kv@w"
        publisher.sequence = 0
        await publisher.publish(batch(0), kept=False)
        await follower.reaches(lambda: follower.hit() == 1)

        assert follower.log == [0]


async def test_cancelling_closes_all_sockets_whenever_it_comes() -> None:
    async with Publisher(*ports()) as publisher:
        publisher.answers = False
        for wait_s in (0.0, 0.05, 0.4):
            follower = Follower(publisher.endpoint, publisher.replay_endpoint)
            task = asyncio.create_task(follower.subscriber.run())
            await asyncio.sleep(wait_s)
            task.cancel()
            async with asyncio.timeout(20):  # ending the context would wait for an open socket
                with pytest.raises(asyncio.CancelledError):
                    await task
