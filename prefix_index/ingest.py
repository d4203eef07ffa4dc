"""KV-cache events of one worker -> the index, in our own block hashes.

Engine hashes depend on engine, version and seed, so they are only names here: the feed hashes each
event's tokens itself and remembers engine hash -> our hash. Blocks whose parent is not known yet
wait for it. Only full-attention groups count: in a hybrid model the others tell nothing about what
a prompt may reuse.

Source: vLLM 0.32 (captured), ``v1/core/kv_cache_utils.py`` for the order of extra keys; SGLang
0.5.23 for its media.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final

import msgspec

from prefix_index.blocks import hash_block, hash_blocks, root_hash
from prefix_index.events import BlockRemoved, BlockStored
from prefix_index.orphans import Orphans

if TYPE_CHECKING:
    from prefix_index.blocks import BlockHash
    from prefix_index.events import EngineHash, Event, EventBatch
    from prefix_index.index import Index, Tier

_FULL_ATTENTION: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
# Media are compared in lower case. What is not listed is taken for the slowest tier.
_TIER_OF_MEDIUM: Final[dict[str, Tier]] = {
    "gpu": "gpu",
    "cpu": "cpu",
    "cpu_pinned": "cpu",
    "host": "cpu",
    "storage": "disk",
    "disk": "disk",
    "fs": "disk",
    "obj": "remote",
    "shared_storage": "remote",
    "external": "remote",
    "remote": "remote",
}
# Blocks that left, kept by name: an offload event may announce their lower copy just afterwards.
_MAX_DEPARTED_BLOCKS: Final = 4096
# Blocks of waiting events, about 10 MB.
_MAX_WAITING_BLOCKS: Final = 65_536

_encode = msgspec.msgpack.Encoder().encode


class WorkerFeed:
    """Applies the event batches of one worker to the index, in order, from one thread.

    Attributes:
        stored: Block copies that came, all tiers.
        removed: Block copies that left.
        orphans: Events that had to wait for their parent.
        rejected: Events that could not be used: other block size, lengths that do not agree,
            tiers of unknown blocks, or orphans given up.
        block_size: Tokens per block as the worker says, 0 before it said so.
    """

    def __init__(self, index: Index, worker: str, model: str) -> None:
        self.stored = 0
        self.removed = 0
        self.orphans = 0
        self.rejected = 0
        self.block_size = 0
        self._index = index
        self._worker = worker
        self._model = model
        self._known: dict[EngineHash, BlockHash] = {}
        self._departed: OrderedDict[EngineHash, tuple[BlockHash, BlockHash]] = OrderedDict()
        self._orphans = Orphans(_MAX_WAITING_BLOCKS)
        self._other_groups: set[int] = set()

    @property
    def waiting(self) -> int:
        """Events that wait for their parent at this moment."""
        return len(self._orphans)

    def apply(self, batch: EventBatch) -> None:
        """Apply one batch. Batches must come in sequence, each once."""
        pending: deque[Event] = deque(batch.events)
        while pending:
            event = pending.popleft()
            if isinstance(event, BlockStored):
                if self._counts(event.group_idx, event.kv_cache_spec_kind):
                    pending.extendleft(reversed(self._store(event)))
            elif isinstance(event, BlockRemoved):
                if event.group_idx not in self._other_groups:
                    self._remove(event)
            else:
                self._clear_blocks()

    def clear(self) -> None:
        """Forget the worker's blocks: new epoch, or events were lost for good."""
        self._clear_blocks()
        self._other_groups.clear()

    def _clear_blocks(self) -> None:
        self._index.clear(self._worker)
        self._known.clear()
        self._departed.clear()
        self._orphans.clear()

    def _counts(self, group: int | None, kind: str | None) -> bool:
        """Say whether a group is full attention; removals and offloads name only the group."""
        if group is None or kind is None:
            return (kind is None or kind in _FULL_ATTENTION) and group not in self._other_groups
        if kind in _FULL_ATTENTION:
            self._other_groups.discard(group)
            return True
        self._other_groups.add(group)
        return False

    def _store(self, event: BlockStored) -> list[Event]:
        """Store an event's blocks and return the events that waited for them."""
        tier = _tier(event.medium)
        if not event.token_ids:
            self._attach(event, tier)
            return []
        size = self.block_size = event.block_size
        if size != self._index.block_size or len(event.block_hashes) * size != len(event.token_ids):
            # Never pair by position: a sliding group lists the last hashes for all tokens.
            self.rejected += 1
            return []
        identified = self._known_chain(event) or self._new_chain(event)
        if identified is None:
            self.orphans += 1
            self.rejected += self._orphans.add(event)
            return []
        hashes, parent = identified
        self._learn(event.block_hashes, hashes)
        self._index.store(self._worker, hashes, parent, tier)
        self.stored += len(hashes)
        return self._orphans.take(event.block_hashes)

    def _known_chain(self, event: BlockStored) -> tuple[list[BlockHash], BlockHash] | None:
        """Return hashes and parent of blocks that are all known: one more copy, or a lower tier.

        An engine hash stands for tokens *and* extras. Copies in lower tiers may be described
        without their extras, and a salted block must stay with its tenant.
        """
        hashes = []
        for engine_hash in event.block_hashes:
            block = self._known.get(engine_hash)
            if block is None:
                return None
            hashes.append(block)
        parent = self._index.parent(self._worker, hashes[0])
        return (hashes, parent) if parent is not None else None

    def _new_chain(self, event: BlockStored) -> tuple[list[BlockHash], BlockHash] | None:
        """Hash an event's blocks; None if their parent is not known."""
        if event.parent_block_hash is None:
            parent, extras = self._start(event)
        else:
            known = self._known.get(event.parent_block_hash)
            if known is None:
                return None
            parent, extras = known, _extras(event)
        return _hash(event, extras, parent), parent

    def _start(self, event: BlockStored) -> tuple[BlockHash, list[bytes]]:
        """Return the root of a chain and the typed extras of its blocks, the salt taken out."""
        salt = ""
        rest = _without_adapter(event)
        first = rest[0] if rest else []
        for at, key in enumerate(first):
            if isinstance(key, str):
                salt = key
                first = rest[0] = first[:at] + first[at + 1 :]
                break
        root = root_hash(self._model, adapter=_adapter(event), salt=salt)
        return root, [_encode(keys) if keys else b"" for keys in rest]

    def _attach(self, event: BlockStored, tier: Tier) -> None:
        """Store copies that are announced without their tokens."""
        for engine_hash in event.block_hashes:
            if self._orphans.defer(engine_hash, event):
                continue
            block = self._known.get(engine_hash)
            parent = self._index.parent(self._worker, block) if block else None
            if block is None or parent is None:
                departed = self._departed.pop(engine_hash, None)
                if departed is None:
                    self.rejected += 1
                    continue
                block, parent = departed
                self._learn([engine_hash], [block])
            self._index.store(self._worker, [block], parent, tier)
            self.stored += 1

    def _remove(self, event: BlockRemoved) -> None:
        tier = _tier(event.medium)
        for engine_hash in event.block_hashes:
            block = self._known.get(engine_hash)
            if block is None:
                self._orphans.defer(engine_hash, event)
                continue
            parent = self._index.parent(self._worker, block)
            self._index.remove(self._worker, [block], tier)
            self.removed += 1
            if not self._index.holds(self._worker, block):
                del self._known[engine_hash]
                if parent is not None:
                    self._departed[engine_hash] = block, parent
                    if len(self._departed) > _MAX_DEPARTED_BLOCKS:
                        self._departed.popitem(last=False)

    def _learn(self, engine_hashes: list[EngineHash], hashes: list[BlockHash]) -> None:
        self._known.update(zip(engine_hashes, hashes, strict=True))
        # An engine that stores without ever removing must not grow this without bound.
        if len(self._known) > self._index.max_blocks:
            for engine_hash in list(self._known)[: len(self._known) // 2]:
                del self._known[engine_hash]


def _tier(medium: str | None) -> Tier:
    return _TIER_OF_MEDIUM.get(medium.lower(), "remote") if medium else "gpu"


def _adapter(event: BlockStored) -> str:
    if event.lora_name:
        return event.lora_name
    # Engines that tell only a number: no request of ours has such a name, so nothing matches,
    # and above all the base model's prompts do not.
    return "" if event.lora_id is None else f"lora_id:{event.lora_id}"


def _without_adapter(event: BlockStored) -> list[list[object]]:
    """Return each block's extra keys without the adapter's name, which leads them."""
    keys = [list(block_keys or ()) for block_keys in event.extra_keys or ()]
    if event.lora_name:
        keys = [block[1:] if block[:1] == [event.lora_name] else block for block in keys]
    return keys


def _extras(event: BlockStored) -> list[bytes]:
    return [_encode(keys) if keys else b"" for keys in _without_adapter(event)]


def _hash(event: BlockStored, extras: list[bytes], parent: BlockHash) -> list[BlockHash]:
    if not any(extras):
        return hash_blocks(event.token_ids, event.block_size, parent)
    hashes = []
    for at in range(len(event.block_hashes)):
        ids = event.token_ids[at * event.block_size : (at + 1) * event.block_size]
        parent = hash_block(ids, parent, extras[at] if at < len(extras) else b"")
        hashes.append(parent)
    return hashes
