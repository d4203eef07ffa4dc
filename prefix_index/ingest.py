"""KV-cache events of one worker -> the index, in our own block hashes.

Engine hashes depend on engine, version and seed, so they are only names here: the feed hashes each
event's tokens itself and remembers engine hash -> our hash. Blocks whose parent is not known yet
wait for it. Only full-attention groups count: in a hybrid model the others tell nothing about what
a prompt may reuse.

An engine's block may be several of the index's (``parts``).

Source: vLLM 0.32 (captured); SGLang 0.5.23 for its media.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from prefix_index.blocks import BlockHash
from prefix_index.events import BlockRemoved, BlockStored, EngineHash
from prefix_index.identity import chain_of
from prefix_index.joining import joined
from prefix_index.names import NameBudget, Names
from prefix_index.orphans import Orphans
from prefix_index.parts import (
    MAX_PARTS,
    EngineBlockSize,
    Held,
    part_names,
    parts_from,
    with_parts,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefix_index.events import Event, EventBatch
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
# Events that wait for their parents: some 50,000 blocks of 64 tokens, a GPU's whole cache.
_MAX_WAITING_BYTES: Final = 16 * 2**20
# KV cache groups that are not full attention; hybrid models have under ten.
_MAX_OTHER_GROUPS: Final = 64


class FeedChange(NamedTuple):
    """What one batch changed; copies and parents are read from the index.

    Attributes:
        cleared: Everything the worker held before is void.
        blocks: Blocks whose copies changed since, each with the engine's name if it has one.
    """

    cleared: bool
    blocks: dict[BlockHash, EngineHash | None]


class WorkerFeed:
    """Applies the event batches of one worker to the index, in order, from one thread.

    Args:
        index: Gets the blocks.
        worker: The holder's name there.
        model: What the pool's roots are made of.
        budget: Memory for engine hashes, shared by the workers of the index.
        names: Engine hashes of blocks that are in the index already, for who goes on where
            another feed ended.

    Attributes:
        on_change: Called after each batch that changed something.
        stored: Block copies that came, all tiers.
        removed: Block copies that left.
        orphans: Events that had to wait for their parent.
        rejected: Events that could not be used: a block size that is no whole multiple of the
            index's, lengths that do not agree, tiers of unknown blocks, or orphans given up.
        implausible: Those of them that contradict themselves or what the worker said before.
        partial: Announcements of a prompt's unfinished last block, which no prompt can reuse.
        unnamed: Blocks not taken because the budget had no room for their names.
        resets: Times the engine said that it dropped its whole cache.
        barren: Batches in a row that announced blocks and yielded none.

    All counts of blocks are in the index's blocks.
    """

    def __init__(
        self,
        index: Index,
        worker: str,
        model: str,
        *,
        budget: NameBudget | None = None,
        names: Names | None = None,
    ) -> None:
        self.on_change: Callable[[FeedChange], None] | None = None
        self.stored = self.removed = self.orphans = self.rejected = 0
        self.implausible = self.partial = self.unnamed = self.resets = self.barren = 0
        self._size = EngineBlockSize()
        self._index = index
        self._worker = worker
        self._model = model
        if names is None:
            budget = budget or NameBudget.for_blocks(index.max_blocks)
            names = Names(budget, lambda block: index.holds(worker, block))
        self._names = names
        self._departed: OrderedDict[EngineHash, tuple[BlockHash, BlockHash]] = OrderedDict()
        self._orphans = Orphans(_MAX_WAITING_BYTES)
        self._other_groups: set[int] = set()
        self._was_cleared = False
        self._changed: dict[BlockHash, EngineHash | None] = {}

    @property
    def block_size(self) -> int:
        """Tokens per block as the worker says, 0 before it said so."""
        return self._size.tokens

    @property
    def waiting(self) -> int:
        """Events that wait for their parent at this moment."""
        return len(self._orphans)

    @property
    def num_names(self) -> int:
        """Engine hashes that are known."""
        return len(self._names)

    @property
    def _may_have_parts(self) -> bool:
        """Whether blocks may be parts of larger ones: also of such as another feed had read."""
        return not self._size.is_certain or self._size.tokens != self._index.block_size

    def apply(self, batch: EventBatch) -> None:
        """Apply one batch. Batches must come in sequence, each once."""
        stored, announces = self.stored, False
        pending: deque[Event] = deque(joined(batch.events))
        while pending:
            event = pending.popleft()
            if isinstance(event, BlockStored):
                if self._counts(event.group_idx, event.kv_cache_spec_kind):
                    announces = True
                    pending.extendleft(reversed(self._store(event)))
            elif isinstance(event, BlockRemoved):
                if event.group_idx not in self._other_groups:
                    self._remove(event)
            else:
                self.resets += 1
                self._forget_blocks()
        if announces:
            self.barren = self.barren + 1 if stored == self.stored else 0
        self._tell()

    def clear(self) -> None:
        """Forget the worker's blocks: new epoch, or events were lost for good."""
        self._forget_blocks()
        self._other_groups.clear()
        self._size = EngineBlockSize()
        self._tell()

    def adopt(self, names: list[EngineHash], blocks: list[BlockHash]) -> bool:
        """Learn the names of blocks that are in the index already; False without room for them.

        They are those of ``FeedChange``: all parts of an engine's block are among them.
        """
        return self._names.add(names, blocks)

    def _forget_blocks(self) -> None:
        self._index.clear(self._worker)
        self._names.clear()
        self._departed.clear()
        self._orphans.clear()
        self._was_cleared = True
        self._changed = {}

    def _tell(self) -> None:
        change = FeedChange(self._was_cleared, self._changed)
        self._was_cleared = False
        if self._changed:
            self._changed = {}
        if self.on_change is not None and (change.cleared or change.blocks):
            self.on_change(change)

    def _counts(self, group: int | None, kind: str | None) -> bool:
        """Say whether a group is full attention; removals and offloads name only the group."""
        if group is None or kind is None:
            return (kind is None or kind in _FULL_ATTENTION) and group not in self._other_groups
        if kind in _FULL_ATTENTION:
            self._other_groups.discard(group)
            return True
        if len(self._other_groups) < _MAX_OTHER_GROUPS:
            self._other_groups.add(group)
        return False

    def _store(self, event: BlockStored) -> list[Event]:
        """Store an event's blocks and return the events that waited for them."""
        tier = _tier(event.medium)
        if not event.token_ids:
            self._attach(event, tier)
            return []
        if not self._fits(event):
            return []
        known = self._known_beginning(event)
        try:
            hashes, parent = self._identify(event, known)
        except OverflowError:  # ids that are no ids of any vocabulary
            self.implausible += 1
            self.rejected += 1
            return []
        if parent is None:
            self.orphans += 1
            self.rejected += self._orphans.add(event)
            return []
        names: list[EngineHash] = event.block_hashes
        if len(names) != len(hashes):
            names = part_names(names, hashes, len(hashes) // len(names))
        if len(known) < len(hashes) and not self._names.add(names, hashes):
            self.unnamed += len(hashes)
            return []
        self._index.store(self._worker, hashes, parent, tier)
        self.stored += len(hashes)
        if self.on_change is not None:
            self._changed.update(zip(hashes, names, strict=True))
        return self._orphans.take(event.block_hashes)

    def _fits(self, event: BlockStored) -> bool:
        """Say whether the event's blocks are whole blocks of the index; count those that are not.

        Hashes and tokens are never paired by position: a sliding group lists the last hashes for
        all tokens.
        """
        size, number = event.block_size, len(event.block_hashes)
        if not number or number * size != len(event.token_ids):
            self.implausible += 1
        elif self._size.takes(size, number):
            if size % self._index.block_size == 0:
                return True
        elif number == 1 and size < self._size.tokens:
            self.partial += 1
            return False
        else:
            self.implausible += 1
        self.rejected += 1
        return False

    def _known_beginning(self, event: BlockStored) -> list[BlockHash]:
        """Return the leading blocks that are known by name, if the worker holds the first one.

        An engine hash stands for tokens *and* extras. Copies in lower tiers may be described
        without their extras, and a salted block must stay with its tenant.
        """
        known: list[BlockHash] = []
        for engine_hash in event.block_hashes:
            block = self._names.get(engine_hash)
            if block is None:
                break
            known.append(block)
        if not known or not self._index.holds(self._worker, known[0]):
            return []
        num_parts = event.block_size // self._index.block_size
        if num_parts > 1:
            known = with_parts(known, num_parts, self._index, self._worker, self._names)
        return known

    def _identify(
        self, event: BlockStored, known: list[BlockHash]
    ) -> tuple[list[BlockHash], BlockHash | None]:
        """Return our hashes of an event's blocks and the first one's parent.

        No hashes and no parent if that is not known.

        Raises:
            OverflowError: If a token id does not fit 32 bits.
        """
        own = self._index.block_size
        if known:
            parent = self._index.parent(self._worker, known[0])
            rest = _behind(event, len(known) * own // event.block_size)
            if rest is not None:
                known = known + chain_of(rest, self._model, known[-1], own)[0]
            return known, parent
        above = None
        if event.parent_block_hash is not None:
            above = self._names.get(event.parent_block_hash)
            if above is None:
                return [], None
        return chain_of(event, self._model, above, own)

    def _attach(self, event: BlockStored, tier: Tier) -> None:
        """Store copies that are announced without their tokens."""
        may_have_parts = self._may_have_parts
        for engine_hash in event.block_hashes:
            if self._orphans.defer(engine_hash, event):
                continue
            held = self._recall(engine_hash)
            if held is None:
                self.rejected += 1
                continue
            parts = [held]
            while may_have_parts and len(parts) < MAX_PARTS:
                held = self._recall(parts[-1].parent)
                if held is None or held.block != parts[-1].parent:
                    break
                parts.append(held)
            for part in reversed(parts):
                self._index.store(self._worker, [part.block], part.parent, tier)
                self.stored += 1
                if self.on_change is not None:
                    self._changed[part.block] = part.name

    def _recall(self, name: EngineHash) -> Held | None:
        """Return the block of a name, if it is held or left just now."""
        block = self._names.get(name)
        parent = self._index.parent(self._worker, block) if block else None
        if block is not None and parent is not None:
            return Held(name, block, parent)
        departed = self._departed.pop(name, None)
        if departed is None or not self._names.add([name], [departed[0]]):
            return None
        return Held(name, *departed)

    def _remove(self, event: BlockRemoved) -> None:
        index, worker, may_have_parts = self._index, self._worker, self._may_have_parts
        leaving: list[tuple[EngineHash, BlockHash, BlockHash | None]] = []
        for engine_hash in event.block_hashes:
            block = self._names.get(engine_hash)
            if block is None:
                self._orphans.defer(engine_hash, event)
                continue
            parent = index.parent(worker, block)
            leaving.append((engine_hash, block, parent))
            # Asked first: making the iterator would cost a fifth of the removal.
            if may_have_parts and parent is not None and self._names.get(parent) == parent:
                leaving += parts_from(parent, index, worker, self._names)
        index.remove(worker, [block for _, block, _ in leaving], _tier(event.medium))
        self.removed += len(leaving)
        for name, block, parent in leaving:
            if self.on_change is not None:
                self._changed[block] = name
            if self._names.get(name) is not None and not index.holds(worker, block):
                self._names.forget(name)
                if parent is not None:
                    self._departed[name] = block, parent
                    if len(self._departed) > _MAX_DEPARTED_BLOCKS:
                        self._departed.popitem(last=False)


def _behind(event: BlockStored, number: int) -> BlockStored | None:
    """Return an event's blocks behind the leading ones; None if there are no others."""
    if number == len(event.block_hashes):
        return None
    return replace(
        event,
        block_hashes=event.block_hashes[number:],
        token_ids=event.token_ids[number * event.block_size :],
        extra_keys=event.extra_keys and event.extra_keys[number:],
    )


def _tier(medium: str | None) -> Tier:
    return _TIER_OF_MEDIUM.get(medium.lower(), "remote") if medium else "gpu"
