"""The groups that were used last, each by itself, and all others as one per pool."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from gateway.worth.group import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Hottest:
    """Groups by pool and name; one event loop only.

    Args:
        max_groups: Groups kept by themselves, of all pools together.

    Attributes:
        rest: Pool -> the sums of those that had to leave.
    """

    def __init__(self, max_groups: int) -> None:
        self.rest: dict[str, Group] = {}
        self._max_groups = max_groups
        self._groups: OrderedDict[tuple[str, str], Group] = OrderedDict()

    def get(self, pool: str, name: str) -> Group | None:
        """Return a group that is kept by itself."""
        return self._groups.get((pool, name))

    def use(self, pool: str, name: str, now_s: float, *, tenant: str, kind: str = "") -> Group:
        """Return a group to add to; the one that was not used for longest leaves for a new one."""
        key = pool, name
        group = self._groups.get(key)
        if group is not None:
            self._groups.move_to_end(key)
            return group
        group = self._groups[key] = Group(now_s, tenant=tenant, kind=kind)
        if len(self._groups) > self._max_groups:
            (old_pool, _), coldest = self._groups.popitem(last=False)
            if old_pool not in self.rest:
                self.rest[old_pool] = Group(now_s)
            self.rest[old_pool].absorb(coldest, now_s)
        return group

    def forget(self, is_meant: Callable[[str, str, Group], bool]) -> int:
        """Forget groups for good, by pool, name and sums; return how many."""
        gone = [key for key, group in self._groups.items() if is_meant(*key, group)]
        for key in gone:
            del self._groups[key]
        return len(gone)

    def items(self) -> Iterator[tuple[str, str, Group]]:
        """Yield pool, name and group of those that are kept by themselves."""
        for (pool, name), group in self._groups.items():
            yield pool, name, group
