"""A publisher that sends anything at all harms its own worker only, over real sockets."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from prefix_index.events import MAX_PAYLOAD_BYTES
from tests.gateway.feed_parts import TOKENS, Telling, stored, telling
from tests.gateway.routing_parts import BLOCK
from tests.gateway.test_feed_fleet import blocks, fleet_of, payload, pool_of, publisher
from tests.prefix_index.publisher import END
from tests.support import poll_until

Frames = list[list[bytes]]


def number(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def packed(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.0, list(events), 0])


def noise(rng: random.Random) -> Frames:
    return [[number(at), rng.randbytes(rng.randrange(200))] for at in range(200)]


def truncated(rng: random.Random) -> Frames:
    whole = payload(stored(0, 3))
    return [[number(at), whole[: rng.randrange(len(whole))]] for at in range(200)]


def flipped(rng: random.Random) -> Frames:
    frames = []
    for at in range(300):
        whole = bytearray(payload(stored(0, 3)))
        for _ in range(rng.randrange(1, 5)):
            whole[rng.randrange(len(whole))] = rng.randrange(256)
        frames.append([number(at), bytes(whole)])
    return frames


def oversized(_rng: random.Random) -> Frames:
    return [[number(at), bytes(MAX_PAYLOAD_BYTES + 1)] for at in range(4)]


def wrong_parts(rng: random.Random) -> Frames:
    sizes = [[], [b""], [b"", b"", b"", b""], [rng.randbytes(7), b"x"], [rng.randbytes(9), b"x"]]
    return [parts for parts in sizes for _ in range(20)]


def sequences(rng: random.Random) -> Frames:
    numbers = [0, 2**64 - 2, 5, 1, 2**63, 2**63 - 1, 0, 0, 7]
    return [[number(rng.choice(numbers)), payload(stored(0, 1))] for _ in range(100)]


def ends_of_replays(_rng: random.Random) -> Frames:
    return [[END, b""], [b"", END, b""], [END, payload(stored(0, 1))]]


def lies(rng: random.Random) -> Frames:
    events = [
        stored(0, 3, block_hashes=[1]),
        stored(0, 1, block_size=2**31),
        stored(0, 1, block_size=1),
        stored(0, 3, block_size=BLOCK // 2),
        stored(0, 1, block_hashes=[2**64 - 1], token_ids=[2**32 - 1] * BLOCK),
    ]
    return [[number(at), payload(rng.choice(events))] for at in range(100)]


def chains_without_a_beginning(rng: random.Random) -> Frames:
    frames = []
    for at in range(200):
        names = [rng.getrandbits(64) for _ in range(8)]
        event = stored(0, 8, block_hashes=names, parent_block_hash=rng.getrandbits(64))
        frames.append([number(at), payload(event)])
    return frames


def its_own_tail(_rng: random.Random) -> Frames:
    rings = [
        stored(0, 2, block_hashes=[1, 1]),
        stored(0, 2, block_hashes=[1, 2], parent_block_hash=2),
        stored(0, 1, block_hashes=[5], parent_block_hash=5),
        stored(0, 3, block_hashes=[7, 8, 7]),
    ]
    return [[number(at), payload(rings[at % 4])] for at in range(40)]


def deep_and_strange(_rng: random.Random) -> Frames:
    nested: Any = []
    for _ in range(500):
        nested = [nested]
    odd = [
        {"type": "BlockStored", "extra_keys": [nested]},
        {"type": "BlockStored", **msgspec.to_builtins(stored(0, 1)), "extra_keys": [[nested]]},
        {"type": "BlockStored", "token_ids": {"a": 1}},
        {"type": "BlockRemoved", "block_hashes": [float("nan")]},
        {"type": "x" * 10_000},
        {1: 2},
    ]
    return [[number(at), packed(*odd)] for at in range(20)] + [
        [number(99), b"\x93\x01" + b"\x91" * 100_000]
    ]


KINDS: list[Callable[[random.Random], Frames]] = [
    noise,
    truncated,
    flipped,
    oversized,
    wrong_parts,
    sequences,
    ends_of_replays,
    lies,
    chains_without_a_beginning,
    its_own_tail,
    deep_and_strange,
]


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__.replace("_", " ") for kind in KINDS])
async def test_whatever_a_publisher_sends_harms_its_own_worker_only(
    kind: Callable[[random.Random], Frames],
) -> None:
    async with publisher() as bad, publisher() as good, telling(Telling()) as url:
        workers = [
            {"id": name, "url": url, "kv_events": source.endpoint}
            for name, source in (("bad", bad), ("good", good))
        ]
        async with fleet_of(*workers) as fleet:
            await bad.subscribed()
            await good.subscribed()
            await good.publish(payload(stored(0, 3)))
            await poll_until(lambda: blocks(fleet, "good") == 3)
            feed = fleet.feeds["bad"]
            for parts in kind(random.Random(7)):
                await bad.send(*parts)
            await bad.send(number(2**64 - 3), packed({"type": "TheEnd"}))
            await poll_until(lambda: feed.subscriber.unknown_events > 0, deadline_s=20)
            # Both are still followed: a new life of the bad one is believed.
            bad.sequence = 0
            await good.publish(payload(stored(3, 8)))
            await poll_until(lambda: blocks(fleet, "good") == 8)
            fleet.feeds["bad"].new_epoch()
            await bad.publish(payload(stored(0, 2)))
            await bad.publish(payload(stored(2, 4)))
            await poll_until(lambda: blocks(fleet, "bad") == 4, deadline_s=20)

            assert pool_of(fleet).workers["bad"].mode == "exact"
            assert feed.ingest.num_names <= 4
            assert fleet.index_state(pool_of(fleet).workers["good"])["health"] == "ok"
            assert len(TOKENS) == 8 * BLOCK
