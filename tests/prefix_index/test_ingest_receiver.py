"""One socket for several publishers: who listens, who connects, and whose message it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import zmq.asyncio

from prefix_index import BlockStored, EventBatch, Index, WorkerFeed, encode_batch
from prefix_index import receiver as receiver_module
from prefix_index.receiver import Inbox, Receiver, Receivers, TopicTakenError, is_bound
from prefix_index.subscriber import EventSubscriber
from tests.prefix_index.publisher import Publisher
from tests.support import free_port, poll_until

B = 4


def batch(block: int) -> bytes:
    return encode_batch(EventBatch(float(block), [BlockStored([block], None, [block] * B, B)]))


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://10.0.0.1:5557", False),
        ("tcp://engine:5557", False),
        # vLLM binds where we connect.
        ("tcp://[fd00::1]:5557", False),
        ("ipc:///run/kv", False),
    ],
)
def test_addresses_that_stand_for_any_host_are_bound(endpoint: str, bound: bool) -> None:
    assert is_bound(endpoint) is bound


class Worker:
    """One worker's subscriber and what it was told."""

    def __init__(
        self, receiver: Receiver, context: zmq.asyncio.Context, topic: str, replay: str | None
    ) -> None:
        self.log: list[int | str] = []
        self.index = Index(B)
        self.feed = WorkerFeed(self.index, "w", "m")
        self.subscriber = EventSubscriber(
            receiver.endpoint,
            replay,
            on_batch=self.take,
            on_clear=self.log.append,
            topic=topic,
            context=context,
            receiver=receiver,
        )

    def take(self, sequence: int, events: EventBatch) -> None:
        self.log.append(sequence)
        self.feed.apply(events)


@asynccontextmanager
async def receiving(endpoint: str, **replays: str | None) -> AsyncIterator[dict[str, Worker]]:
    """Follow an endpoint for one worker per topic."""
    context = zmq.asyncio.Context()
    receiver = Receivers(context).at(endpoint)
    workers = {t: Worker(receiver, context, t, replay) for t, replay in replays.items()}
    tasks = [asyncio.create_task(worker.subscriber.run()) for worker in workers.values()]
    try:
        yield workers
        assert not any(task.done() for task in tasks), tasks
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        context.term()


async def test_publishers_that_connect_to_one_socket_are_told_apart_by_topic() -> None:
    port = free_port()
    names = ("alpha", "beta")
    async with AsyncExitStack() as stack:
        publishers = {
            name: await stack.enter_async_context(
                Publisher(port, free_port(), topic=name.encode(), connects=True)
            )
            for name in names
        }
        replays = {name: publishers[name].replay_endpoint for name in names}
        workers = await stack.enter_async_context(receiving(f"tcp://*:{port}", **replays))
        for publisher in publishers.values():
            await publisher.subscribed()
        # Sequences are each publisher's own.
        for block in range(3):
            await publishers["alpha"].publish(batch(block))
        await publishers["beta"].publish(batch(9))
        await poll_until(lambda: [len(workers[name].log) for name in names] == [3, 1])

        assert workers["alpha"].log == [0, 1, 2]
        assert workers["beta"].log == [0]
        # A gap of one is none of the other's.
        await publishers["beta"].publish(batch(10), live=False)
        await publishers["beta"].publish(batch(11))
        await publishers["alpha"].publish(batch(3))
        await poll_until(lambda: [len(workers[name].log) for name in names] == [4, 3])
        gaps = [workers[name].subscriber.gaps for name in names]
        assert gaps == [0, 1]


async def test_what_connects_again_after_a_crash_is_followed_again() -> None:
    port, replay_port = free_port(), free_port()
    replay = f"tcp://127.0.0.1:{replay_port}"
    async with receiving(f"tcp://*:{port}", kv=replay) as workers:
        for life in range(2):
            async with Publisher(port, replay_port, topic=b"kv", connects=True) as publisher:
                await publisher.subscribed()
                for block in range(2):
                    await publisher.publish(batch(10 * life + block))
                await poll_until(lambda: workers["kv"].log[-2:] == [0, 1])
                workers["kv"].log.append("seen")

        assert workers["kv"].log == [0, 1, "seen", "sequence started again", 0, 1, "seen"]
        assert workers["kv"].subscriber.restarts == 1


async def test_the_longest_topic_that_fits_says_whose_a_message_is() -> None:
    port = free_port()
    async with (
        Publisher(port, free_port(), topic=b"kv@pod-1@model") as publisher,
        receiving(publisher.endpoint, **{"kv@": None, "kv@pod-1": None}) as workers,
    ):
        await publisher.subscribed()
        await publisher.publish(batch(0))
        await poll_until(lambda: workers["kv@pod-1"].log == [0])
        publisher.topic = b"kv@pod-2@model"
        publisher.sequence = 0
        await publisher.publish(batch(0))
        await poll_until(lambda: workers["kv@"].log == [0])

        assert workers["kv@pod-1"].log == [0]


async def test_a_topic_belongs_to_one_worker() -> None:
    context = zmq.asyncio.Context()
    try:
        receiver = Receiver(context, f"tcp://127.0.0.1:{free_port()}")
        receiver.join("kv", Inbox(lambda: None))
        with pytest.raises(TopicTakenError, match="topic 'kv'"):
            receiver.join("kv", Inbox(lambda: None))
        receiver.leave("kv")
        receiver.join("kv", Inbox(lambda: None))
        receiver.leave("kv")
        receiver.leave("nobody's")
    finally:
        context.term()


@pytest.mark.parametrize("endpoint", ["tcp://nowhere", "udp://h:1", "tcp://*:events", ""])
async def test_an_address_that_is_none_is_an_error_that_leaves_nothing_behind(
    endpoint: str,
) -> None:
    context = zmq.asyncio.Context()
    try:
        with pytest.raises(zmq.ZMQError):
            Receiver(context, endpoint).join("", Inbox(lambda: None))
    finally:
        context.term()  # would wait for an open socket


async def test_a_flood_through_one_socket_lets_other_tasks_run() -> None:
    async with (
        Publisher(free_port(), free_port(), topic=b"kv") as publisher,
        receiving(publisher.endpoint, kv=None) as workers,
    ):
        await publisher.subscribed()
        for block in range(2000):
            await publisher.publish(batch(block))
        turns = 0
        while len(workers["kv"].log) < 2000:
            await asyncio.sleep(0)
            turns += bool(workers["kv"].log)

        assert turns > 10
        assert workers["kv"].log == list(range(2000))


def test_what_waits_for_a_worker_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver_module, "MAX_WAITING_BYTES", 100)
    calls: list[None] = []
    inbox = Inbox(lambda: calls.append(None))
    for _ in range(25):
        inbox.put([b"0123456789"])

    assert len(inbox) == 5
    assert inbox.num_dropped == 20
    assert len(calls) == 25
    while inbox:
        assert inbox.take() == [b"0123456789"]
    inbox.put([b"x" * 100])
    assert inbox.num_dropped == 20


async def test_what_was_dropped_because_too_much_waited_comes_by_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiver_module, "MAX_WAITING_BYTES", 2000)
    async with Publisher(free_port(), free_port(), topic=b"kv") as publisher:
        publisher.answers = False
        async with receiving(publisher.endpoint, kv=publisher.replay_endpoint) as workers:
            await publisher.subscribed()
            for block in range(200):
                await publisher.publish(batch(block))
            await poll_until(lambda: workers["kv"].subscriber._inbox.num_dropped > 0)
            publisher.answers = True
            await poll_until(lambda: workers["kv"].feed.stored == 200)

            assert [entry for entry in workers["kv"].log if isinstance(entry, int)] == list(
                range(200)
            )


async def test_a_replay_that_overran_the_publishers_own_queue_is_asked_for_again() -> None:
    async with Publisher(free_port(), free_port(), topic=b"kv") as publisher:
        for block in range(50):
            await publisher.publish(batch(block), live=False)
        publisher.max_answer = 20
        async with receiving(publisher.endpoint, kv=publisher.replay_endpoint) as workers:
            await poll_until(lambda: workers["kv"].feed.stored == 50)

            assert workers["kv"].log == list(range(50))
            assert publisher.questions[:3] == [0, 18, 36]
