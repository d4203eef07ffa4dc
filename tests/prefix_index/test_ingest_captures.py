"""Every recorded file through the whole ingest: publisher, sockets, subscriber, feed, index."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from prefix_index import EventBatch, Index, WorkerFeed
from prefix_index import subscriber as subscriber_module
from prefix_index.subscriber import EventSubscriber
from tests.prefix_index import capture
from tests.prefix_index.publisher import Publisher
from tests.prefix_index.test_captures import Replay, assert_equal
from tests.support import free_port, poll_until


class Ingest:
    """A worker's whole ingest, and the multiset of what it was sent."""

    def __init__(self, endpoint: str, replay_endpoint: str, block_size: int) -> None:
        self.index = Index(block_size)
        self.feed = WorkerFeed(self.index, "w", "m")
        self.sequences: list[int] = []
        self.num_clears = 0
        self.subscriber = EventSubscriber(
            endpoint, replay_endpoint, on_batch=self._apply, on_clear=self._clear
        )

    def _apply(self, sequence: int, batch: EventBatch) -> None:
        self.sequences.append(sequence)
        self.feed.apply(batch)

    def _clear(self, _reason: str) -> None:
        self.num_clears += 1
        self.feed.clear()


@asynccontextmanager
async def following(publisher: Publisher, block_size: int) -> AsyncIterator[Ingest]:
    ingest = Ingest(publisher.endpoint, publisher.replay_endpoint, block_size)
    task = asyncio.create_task(ingest.subscriber.run())
    try:
        yield ingest
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def frames_of(names: list[str]) -> tuple[int, list[tuple[int, bytes]]]:
    files = [capture.load(name) for name in names]
    return files[0].block_size, [frame for file in files for frame in file.frames]


def naive(frames: list[tuple[int, bytes]]) -> Replay:
    """Return what a multiset of the events holds after them."""
    model = Replay()
    for _, payload in frames:
        model.apply(payload)
    return model


SERIES = [[name] for name in capture.FILES] + list(capture.SERVERS.values())


@pytest.mark.parametrize(
    "names", SERIES, ids=[names[0] + "+" * (len(names) - 1) for names in SERIES]
)
@pytest.mark.parametrize("old", [True, False], ids=["three parts", "four parts"])
async def test_the_index_after_a_recorded_stream_equals_a_multiset_of_its_events(
    names: list[str], old: bool
) -> None:
    block_size, frames = frames_of(names)
    half = len(frames) // 2
    async with Publisher(free_port(), free_port(), old=old) as publisher:
        publisher.sequence = frames[0][0]
        for _, payload in frames[:half]:
            await publisher.publish(payload, live=False)
        async with following(publisher, block_size) as ingest:
            await publisher.subscribed()
            for at, (_, payload) in enumerate(frames[half:]):
                # Every third is lost on the way.
                await publisher.publish(payload, live=at % 3 != 1)
            last = await publisher.publish(EMPTY)
            await poll_until(lambda: ingest.sequences[-1:] == [last])

            assert ingest.sequences == [*(sequence for sequence, _ in frames), last]
            assert_equal(ingest.index, naive(frames))
            assert ingest.subscriber.decode_errors == ingest.subscriber.restarts == 0
            # A file from the middle of a server's life begins behind what nobody has any more.
            assert ingest.num_clears == (frames[0][0] > 0)


EMPTY = b"\x93\xcb\x41\x00\x00\x00\x00\x00\x00\x00\x90\x00"


def is_through(ingest: Ingest, last: int, restarts: int) -> bool:
    subscriber = ingest.subscriber
    return (subscriber.last_sequence, subscriber.restarts) == (last, restarts)


@pytest.mark.parametrize("names", capture.SERVERS.values(), ids=capture.SERVERS)
async def test_a_server_that_is_killed_and_lives_again_is_followed_through_both_lives(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber_module, "_IDLE_CHECK_S", 0.2)
    block_size, frames = frames_of(names)
    address = free_port(), free_port()
    async with following(Publisher(*address), block_size) as ingest:
        for life in range(2):
            # The second life is cut short, so that its end is another one.
            lived = frames if life == 0 else frames[: len(frames) * 2 // 3]
            async with Publisher(*address) as publisher:
                for at, (_, payload) in enumerate(lived):
                    await publisher.publish(_aged(payload, life), live=at % 2 == 0)
                await poll_until(partial(is_through, ingest, len(lived) - 1, life))

            assert_equal(ingest.index, naive(lived))


def _aged(payload: bytes, life: int) -> bytes:
    """Return a batch as another process would have sent it: at another time."""
    assert payload[1] == 0xCB  # a 64-bit float
    return payload[:2] + bytes([payload[2]]) + payload[3:9] + bytes([life]) + payload[10:]
