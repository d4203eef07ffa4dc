"""Engine hash -> our hash: the names by which an engine removes and continues its blocks.

The names are needed only where events are read, and cost more than the view itself, so they
have a budget of their own. A block without a name can never be removed, so it must not be believed
either: beyond the budget new blocks are refused until old names have left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prefix_index.blocks import BlockHash
    from prefix_index.events import EngineHash

# A 32-byte digest (80 bytes as allocated; a 64-bit int has 48), our hash (64) and their share of a
# dict (62 on average, measured).
NAME_BYTES: Final = 208
# Names whose block the view has given up linger until they are found. With a fifth of slack, five
# looked at make room for one.
_SLACK: Final = 1.25
_LOOKS_PER_NAME: Final = 8


class NameBudget:
    """How many bytes the names of all workers of one index may take.

    Attributes:
        max_names: The bound, in names of ``NAME_BYTES``.
        num_names: Names that are known.
    """

    __slots__ = ("_dead", "max_names", "num_names")

    def __init__(self, max_bytes: int) -> None:
        self.max_names = max_bytes // NAME_BYTES
        self.num_names = 0
        self._dead: list[dict[EngineHash, BlockHash]] = []

    @classmethod
    def for_blocks(cls, max_blocks: int) -> NameBudget:
        """Return the budget that goes with a view of so many blocks."""
        return cls(int(max_blocks * _SLACK) * NAME_BYTES)

    @property
    def used_bytes(self) -> int:
        """Estimate of the memory the names take."""
        return self.num_names * NAME_BYTES

    def bury(self, names: dict[EngineHash, BlockHash]) -> None:
        """Take over the names of a cleared worker; ``sweep`` frees them."""
        self.num_names -= len(names)
        if names:
            self._dead.append(names)

    def sweep(self, max_names: int) -> bool:
        """Free so many buried names, and say whether there are more: freeing millions takes long.

        Whoever owns the event loop calls it now and then.
        """
        while self._dead and max_names > 0:
            names = self._dead[-1]
            for _ in range(min(len(names), max_names)):
                names.popitem()
                max_names -= 1
            if not names:
                self._dead.pop()
        return bool(self._dead)


class Names:
    """The names of one worker's blocks.

    Args:
        budget: Shared with the other workers of the index.
        is_held: Says whether the view still has a block.
    """

    __slots__ = ("_budget", "_by_name", "_is_held", "_looked_at", "get")

    def __init__(self, budget: NameBudget, is_held: Callable[[BlockHash], bool]) -> None:
        self._budget = budget
        self._is_held = is_held
        self._use({})

    def __len__(self) -> int:
        return len(self._by_name)

    def items(self) -> Iterable[tuple[EngineHash, BlockHash]]:
        """Return all (name, block)."""
        return self._by_name.items()

    def add(self, names: list[EngineHash], blocks: list[BlockHash]) -> bool:
        """Remember the names of these blocks; False, and nothing is kept, without room for them."""
        budget = self._budget
        if budget.num_names + len(names) > budget.max_names:
            self._forget_stale(_LOOKS_PER_NAME * len(names))
            if budget.num_names + len(names) > budget.max_names:
                return False
        before = len(self._by_name)
        self._by_name.update(zip(names, blocks, strict=True))
        budget.num_names += len(self._by_name) - before
        return True

    def forget(self, name: EngineHash) -> None:
        """Forget a name that is known."""
        del self._by_name[name]
        self._budget.num_names -= 1

    def clear(self) -> None:
        """Forget all names, in O(1): the memory is freed by the budget's ``sweep``."""
        self._budget.bury(self._by_name)
        self._use({})

    def _use(self, by_name: dict[EngineHash, BlockHash]) -> None:
        self._by_name = by_name
        # Return the block of a name, or None; bound once, since it is asked for every block.
        self.get = by_name.get
        self._looked_at: Iterator[EngineHash] = iter(())

    def _forget_stale(self, looks: int) -> None:
        """Look at some names, each in its turn, and forget those that the view has given up."""
        for _ in range(looks if self._by_name else 0):
            name = next(self._looked_at, None)
            if name is None:
                self._looked_at = iter(list(self._by_name))
                name = next(self._looked_at, None)
                if name is None:
                    return
            block = self.get(name)
            if block is not None and not self._is_held(block):
                self.forget(name)
