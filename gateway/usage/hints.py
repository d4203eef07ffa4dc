"""How many requests name their documents and chunks: without them only the text can tell."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from gateway.routing.segments import hints_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gateway.routing.plan import Plan


@dataclass(slots=True)
class Hinted:
    """Served requests of one pool since the start.

    Attributes:
        requests: All.
        with_documents: Those that named a document.
        with_chunks: Those that named the chunks of one.
    """

    requests: int = 0
    with_documents: int = 0
    with_chunks: int = 0


class HintCounts:
    """Counts per pool; event loop only."""

    def __init__(self) -> None:
        self._pools: dict[str, Hinted] = {}

    def add(self, plan: Plan) -> None:
        """Count a served request. About a microsecond where it has hints, else much less."""
        name, hints = plan.pool.name, hints_of(plan.inbound)
        count = self._pools.get(name)
        if count is None:
            count = self._pools[name] = Hinted()
        count.requests += 1
        count.with_documents += hints.has_documents
        count.with_chunks += bool(hints.chunks)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per pool, as plain JSON values."""
        return [{"pool": pool, **asdict(count)} for pool, count in self._pools.items()]


def merged_hints(documents: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Add up what several processes counted."""
    rows: dict[str, dict[str, Any]] = {}
    for row in (row for document in documents for row in document):
        into = rows.setdefault(row["pool"], {"pool": row["pool"], **asdict(Hinted())})
        for field in fields(Hinted):
            into[field.name] += row[field.name]
    return list(rows.values())
