from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import zmq

from prefix_index.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    decode_batch,
)
from runner.publisher import EventPublisher, PublisherError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOPIC = "kv@test"
END = b"\xff" * 8

Connect = Callable[[int, str | None], zmq.Socket[bytes]]

# A message that is on its way arrives in microseconds; this bounds a failing test.
RECEIVE_TIMEOUT_MS = 5_000


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens client sockets and closes them at the end."""
    context = zmq.Context()
    opened: list[zmq.Socket[bytes]] = []

    def connect(kind: int, endpoint: str | None) -> zmq.Socket[bytes]:
        assert endpoint is not None
        client = context.socket(kind)
        opened.append(client)
        client.setsockopt(zmq.RCVTIMEO, RECEIVE_TIMEOUT_MS)
        if kind == zmq.SUB:
            client.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        client.connect(endpoint)
        return client

    yield connect
    context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    publisher = EventPublisher(
        "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", topic=TOPIC, clock=lambda: 12.5, buffer_batches=8
    )
    publisher.start()
    yield publisher
    publisher.close()


def stored(number: int) -> list[Event]:
    return [
        BlockStored(
            block_hashes=[number],
            parent_block_hash=None,
            token_ids=[1, 2],
            block_size=2,
            medium="GPU",
        )
    ]


def publish_until_subscribed(publisher: EventPublisher, subscriber: zmq.Socket[bytes]) -> int:
    """A subscription takes effect some time after connecting: send until a message arrives.

    Returns the number of batches sent; all received ones are taken off the socket.
    """
    for sent in range(1, 500):
        publisher.publish(stored(sent))
        if subscriber.poll(20):
            last = -1
            while last < sent - 1:
                last = int.from_bytes(subscriber.recv_multipart()[1], "big")
            return sent
    raise AssertionError("nothing received")


def ask_replay(asker: zmq.Socket[bytes], start: int) -> list[list[bytes]]:
    asker.send_multipart([b"", start.to_bytes(8, "big")])
    answers = []
    while True:
        answers.append(asker.recv_multipart())
        if answers[-1][2] == END:
            return answers


def test_live_batches_come_in_order_with_topic_sequence_and_payload(
    connect: Connect, publisher: EventPublisher
) -> None:
    subscriber = connect(zmq.SUB, publisher.endpoint)
    sent = publish_until_subscribed(publisher, subscriber)
    events: list[Event] = [BlockRemoved(block_hashes=[7], medium="GPU"), AllBlocksCleared()]

    publisher.publish(events)
    publisher.publish(stored(1))

    first, second = subscriber.recv_multipart(), subscriber.recv_multipart()
    assert first[:2] == [TOPIC.encode(), sent.to_bytes(8, "big")]
    assert second[:2] == [TOPIC.encode(), (sent + 1).to_bytes(8, "big")]
    assert decode_batch(first[2]) == EventBatch(12.5, events, 0)
    assert decode_batch(second[2]) == EventBatch(12.5, stored(1), 0)


def test_replay_gives_the_asked_batches_in_four_frames_and_an_end_marker(
    connect: Connect, publisher: EventPublisher
) -> None:
    for number in range(5):
        publisher.publish(stored(number))
    asker = connect(zmq.DEALER, publisher.replay_endpoint)
    # The publisher thread may still be sending: what it has not numbered yet is not replayed.
    while len(answers := ask_replay(asker, 0)) < 6:
        pass

    late = ask_replay(asker, 3)

    assert [answer[:3] for answer in answers[:-1]] == [
        [b"", TOPIC.encode(), number.to_bytes(8, "big")] for number in range(5)
    ]
    assert [decode_batch(answer[3]).events for answer in answers[:-1]] == [
        stored(number) for number in range(5)
    ]
    assert answers[-1] == late[-1] == [b"", b"", END, b""]
    assert late[:-1] == answers[3:5]


def test_only_the_newest_batches_are_replayed(connect: Connect, publisher: EventPublisher) -> None:
    for number in range(20):
        publisher.publish(stored(number))
    asker = connect(zmq.DEALER, publisher.replay_endpoint)
    last = (19).to_bytes(8, "big")
    while (answers := ask_replay(asker, 0))[-2:][0][2] != last:
        pass

    assert [int.from_bytes(answer[2], "big") for answer in answers[:-1]] == list(range(12, 20))


def test_a_replay_from_the_future_is_empty(connect: Connect, publisher: EventPublisher) -> None:
    asker = connect(zmq.DEALER, publisher.replay_endpoint)

    assert ask_replay(asker, 1_000) == [[b"", b"", END, b""]]


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([b""], id="no sequence"),
        pytest.param([b"", b"short"], id="short sequence"),
        pytest.param([b"", b"12345678", b"extra"], id="too many frames"),
        pytest.param([b"x" * 100_000], id="one long frame"),
    ],
)
def test_a_malformed_replay_request_does_not_disturb_the_next(
    connect: Connect, publisher: EventPublisher, frames: list[bytes]
) -> None:
    asker = connect(zmq.DEALER, publisher.replay_endpoint)

    asker.send_multipart(frames)

    assert ask_replay(asker, 0)[-1] == [b"", b"", END, b""]


def test_the_whole_buffer_is_replayed_though_it_exceeds_zmq_default_limits(
    connect: Connect,
) -> None:
    publisher = EventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", topic=TOPIC)
    for number in range(3_000):
        publisher.publish(stored(number))
    publisher.start()
    try:
        asker = connect(zmq.DEALER, publisher.replay_endpoint)
        asker.send_multipart([b"", bytes(8)])
        # Let the answers pile up on the publisher's side before reading any.
        assert asker.poll(RECEIVE_TIMEOUT_MS)
        count = 0
        while asker.recv_multipart()[2] != END:
            count += 1
    finally:
        publisher.close()

    assert count == 3_000


def test_queued_events_are_sent_before_closing(connect: Connect, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    publisher = EventPublisher(endpoint, topic=TOPIC)
    publisher.start()
    subscriber = connect(zmq.SUB, publisher.endpoint)
    sent = publish_until_subscribed(publisher, subscriber)
    for number in range(50):
        publisher.publish(stored(number))

    publisher.close()

    numbers = [int.from_bytes(subscriber.recv_multipart()[1], "big") for _ in range(50)]
    assert numbers == list(range(sent, sent + 50))


def test_without_a_replay_endpoint_there_is_none(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    publisher = EventPublisher(endpoint, topic=TOPIC)
    publisher.close()

    assert (publisher.endpoint, publisher.replay_endpoint) == (endpoint, None)


def test_the_description_has_the_members_vllm_answers(publisher: EventPublisher) -> None:
    description = publisher.describe()

    assert description["topic"] == TOPIC
    assert description["endpoint"].startswith("tcp://127.0.0.1:")
    assert not description["endpoint"].endswith(":0")
    assert set(description) == {
        "enable_kv_cache_events",
        "publisher",
        "endpoint",
        "replay_endpoint",
        "buffer_steps",
        "hwm",
        "max_queue_size",
        "topic",
    }


def test_a_wildcard_host_is_kept_in_the_description() -> None:
    publisher = EventPublisher("tcp://*:0", topic=TOPIC)

    assert publisher.endpoint.startswith("tcp://*:")
    assert int(publisher.endpoint.rpartition(":")[2]) > 0
    publisher.close()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1", "nonsense", "tcp://256.1.1.1:5"])
def test_an_endpoint_that_cannot_be_bound_is_named(endpoint: str) -> None:
    with pytest.raises(PublisherError, match=endpoint):
        EventPublisher(endpoint, topic=TOPIC)


def test_a_taken_port_is_named(publisher: EventPublisher) -> None:
    with pytest.raises(PublisherError, match="in use"):
        EventPublisher("tcp://127.0.0.1:0", publisher.endpoint, topic=TOPIC)
