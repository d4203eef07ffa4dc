"""The index after real vLLM traffic is what the engine's own events and answers say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from prefix_index import Hit, Index, WorkerFeed, decode_batch, hash_blocks, root_hash
from prefix_index.index import Tier
from tests.prefix_index import capture

TIERS: dict[str, Tier] = {"GPU": "gpu", "CPU": "cpu", "STORAGE": "disk"}


class Replay:
    """A multiset of engine hashes, built from the raw payloads without any of our code."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[Any, Tier]] = Counter()
        # engine hash -> (parent's engine hash, tokens, (adapter, salt) if it starts a prompt)
        self.blocks: dict[Any, tuple[Any, list[int], tuple[str, str] | None]] = {}
        self.full_groups: set[Any] = {None}

    def apply(self, payload: bytes) -> None:
        for raw in msgspec.msgpack.decode(payload)[1]:
            event = raw if isinstance(raw, dict) else named(raw)
            if event["type"] == "AllBlocksCleared":
                self.copies.clear()
                self.blocks.clear()
                continue
            if event.get("kv_cache_spec_kind") == "full_attention":
                self.full_groups.add(event["group_idx"])
            is_old = event["type"] == "BlockRemoved" or "kv_cache_spec_kind" not in event
            if event.get("group_idx") not in self.full_groups and not is_old:
                continue
            if event["type"] == "BlockRemoved" and event.get("group_idx") not in self.full_groups:
                continue
            tier = TIERS[event["medium"]]
            for at, name in enumerate(event["block_hashes"]):
                if event["type"] == "BlockRemoved":
                    self.copies[name, tier] = max(self.copies[name, tier] - 1, 0)
                    continue
                if event["token_ids"]:
                    self.learn(event, at, name)
                if name in self.blocks:
                    self.copies[name, tier] += 1

    def learn(self, event: dict[str, Any], at: int, name: Any) -> None:
        size = event["block_size"]
        tokens = event["token_ids"][at * size : (at + 1) * size]
        parent = event["block_hashes"][at - 1] if at else event["parent_block_hash"]
        identity = None
        if parent is None:
            extras = list((event.get("extra_keys") or [None])[0] or [])
            adapter = event.get("lora_name") or ""
            salt = "".join(extra for extra in extras if extra != adapter)
            identity = (adapter, salt)
        # One engine hash is one content: a later announcement may say less about it.
        self.blocks.setdefault(name, (parent, tokens, identity))

    def chain(self, name: Any) -> list[bytes] | None:
        """Return a block's chain in our hashes; None if its start is unknown."""
        tokens: list[int] = []
        while name is not None:
            if name not in self.blocks:
                return None
            name, ids, identity = self.blocks[name]
            tokens = ids + tokens
        assert identity is not None
        root = root_hash("m", adapter=identity[0], salt=identity[1])
        return hash_blocks(tokens, len(ids), root)


def named(event: list[Any]) -> dict[str, Any]:
    names = {
        "BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id medium"
        " lora_name extra_keys group_idx kv_cache_spec_kind kv_cache_spec_sliding_window",
        "BlockRemoved": "block_hashes medium group_idx",
        "AllBlocksCleared": "",
    }[event[0]].split()
    return {"type": event[0], **dict(zip(names, event[1:], strict=False))}


def replay(payloads: Iterable[bytes], block_size: int) -> tuple[Index, WorkerFeed, Replay]:
    index = Index(block_size)
    feed, naive = WorkerFeed(index, "w", "m"), Replay()
    for payload in payloads:
        feed.apply(decode_batch(payload))
        naive.apply(payload)
        assert_equal(index, naive)
    return index, feed, naive


def assert_equal(index: Index, naive: Replay) -> None:
    """Compare every block that was ever named: copies by tier, and what a walk would hit."""
    chains = {name: chain for name in naive.blocks if (chain := naive.chain(name)) is not None}
    copies: Counter[tuple[bytes, Tier]] = Counter()
    for (name, tier), number in naive.copies.items():
        if name in chains:
            copies[chains[name][-1], tier] += number
    for chain in chains.values():
        expected: Counter[str] = Counter()
        for block in chain:
            best = next((tier for tier in TIERS.values() if copies[block, tier]), None)
            if best is None:
                break
            expected[best] += index.block_size

        assert index.match(chain).get("w", Hit()) == Hit(**expected)
        for tier in TIERS.values():
            assert index.holds("w", chain[-1], tier) == (copies[chain[-1], tier] > 0)
    assert index.num_blocks == len({block for (block, _), number in copies.items() if number})


@pytest.mark.parametrize("name", capture.FILES)
def test_after_each_batch_the_index_equals_a_multiset_of_the_events(name: str) -> None:
    file = capture.load(name)
    _, feed, _ = replay((payload for _, payload in file.frames), file.block_size)

    assert feed.stored > 0
    # Only announcements without tokens of blocks that nobody named before are of no use.
    assert feed.rejected == (2 if name == "synth-vllm0.32.0" else 0)


@pytest.mark.parametrize("names", capture.SERVERS.values(), ids=capture.SERVERS)
def test_the_captures_of_one_server_follow_each_other(names: list[str]) -> None:
    files = [capture.load(name) for name in names]
    frames = [frame for file in files for frame in file.frames]

    assert [sequence for sequence, _ in frames] == list(range(len(frames)))

    index, feed, _ = replay((payload for _, payload in frames), files[0].block_size)

    assert index.num_blocks > 0
    assert feed.orphans == feed.rejected == 0


@pytest.mark.parametrize("name", capture.COMPLETE)
def test_where_nothing_was_evicted_the_index_holds_the_full_blocks_of_all_requests(
    name: str,
) -> None:
    file = capture.load(name)
    index = Index(file.block_size)
    feed = WorkerFeed(index, "w", "m")
    for _, payload in file.frames:
        feed.apply(decode_batch(payload))
    expected = set()
    for exchange in file.exchanges:
        # The last generated token was sampled but never computed.
        computed = exchange.prompt_ids + exchange.generated_ids[:-1]
        chain = hash_blocks(computed, file.block_size, root_hash("m"))
        expected.update(chain)

        assert index.match(chain)["w"] == Hit(gpu=len(chain) * file.block_size)

    assert index.num_blocks == len(expected)
    assert feed.orphans == feed.rejected == 0


def test_salted_requests_are_credited_to_their_salt_alone() -> None:
    files = [capture.load(name) for name in capture.SERVERS["b32"][:4]]
    index = Index(32)
    feed = WorkerFeed(index, "w", "m")
    for file in files:
        for _, payload in file.frames:
            feed.apply(decode_batch(payload))
    salts = {exchange.body.get("cache_salt", "") for exchange in files[-1].exchanges}
    for exchange in files[-1].exchanges:
        own = exchange.body.get("cache_salt", "")
        for salt in salts | {"somebody else"}:
            chain = hash_blocks(exchange.prompt_ids, 32, root_hash("m", salt=salt))
            hit = index.match(chain).get("w", Hit()).total
            if salt == own:
                assert hit == len(chain) * 32
            elif salt == "somebody else":
                assert hit == 0

    assert len(salts) == 3


def test_adapter_requests_are_credited_to_their_adapter_alone() -> None:
    file = capture.load("vllm0.32-b64-cbor-bytes-lora")
    index = Index(64)
    feed = WorkerFeed(index, "w", "m")
    feed.apply(decode_batch(file.frames[0][1]))
    ids = file.exchanges[1].prompt_ids
    adapted = hash_blocks(ids, 64, root_hash("m", adapter="ad1"))

    assert index.match(adapted) == {}

    feed.apply(decode_batch(file.frames[1][1]))

    assert index.match(adapted)["w"].total == len(adapted) * 64
