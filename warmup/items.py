"""From a manifest to what the gateway is sent: items in order of priority, in bounded batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warmup.captured import read_captured
from warmup.documents import Ids, Problem, read_documents
from warmup.frames import MARKER, body_of, to_json
from warmup.manifest import DocumentEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from warmup.documents import Document
    from warmup.manifest import CapturedEntry, Manifest, Placing

# A quarter of what a gateway takes by default, and some seconds of work for any fleet: small enough
# to hold, large enough that waiting for a batch's last document is lost time in the percent.
MAX_BATCH_BYTES = 8 << 20
MAX_BATCH_ITEMS = 256

# What holds where neither an entry nor the defaults say anything.
NOTHING_SAID = {
    "version": None,
    "copies": None,
    "pin": False,
    "priority": 0,
    "tenant": None,
    "headers": None,
}


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to warm.

    Attributes:
        id: Unique within the manifest.
        data: The item as JSON.
    """

    id: str
    data: bytes


def read_items(manifest: Manifest, folder: Path) -> Iterator[Item | Problem]:
    """Yield everything a manifest names, higher priorities first; one at a time in memory.

    Args:
        manifest: What to warm.
        folder: Where relative paths begin.
    """
    entries: list[DocumentEntry | CapturedEntry] = [*manifest.documents, *manifest.captured]
    ids = Ids()
    for entry in sorted(entries, key=lambda entry: -_placing(entry, manifest)["priority"]):
        placing = _placing(entry, manifest)
        if isinstance(entry, DocumentEntry):
            for document in read_documents(folder, entry, ids):
                yield (
                    document
                    if isinstance(document, Problem)
                    else _asked(manifest, document, placing)
                )
        else:
            kind = "prefix" if entry.whole else "document"
            for captured in read_captured(folder, entry, manifest.model, ids):
                yield (
                    captured
                    if isinstance(captured, Problem)
                    else _item(captured[0], kind, captured[1], None, placing)
                )


def batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield the items in lists that are neither long nor large; one list at a time in memory."""
    batch: list[Item] = []
    size = 0
    for item in items:
        if batch and (len(batch) == MAX_BATCH_ITEMS or size + len(item.data) > MAX_BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += len(item.data)
    if batch:
        yield batch


def _asked(manifest: Manifest, document: Document, placing: dict[str, Any]) -> Item:
    """Return a document in its frame, with a mark where questions will stand."""
    assert manifest.frame is not None, "the manifest requires it"
    body = body_of(manifest.frame, manifest.model, document.text)
    return _item(document.id, "document", to_json(body), MARKER, placing)


def _item(name: str, kind: str, body: bytes, marker: str | None, placing: dict[str, Any]) -> Item:
    """Return an item around a body that is JSON already, so that its bytes stay as they are."""
    rest = to_json({"id": name, "kind": kind, "marker": marker, **placing})
    return Item(name, rest[:-1] + b', "body": ' + body + b"}")


def _placing(entry: Placing, manifest: Manifest) -> dict[str, Any]:
    """Return how an entry is to be kept, with the defaults for what it does not say."""
    found = {}
    for name, nothing in NOTHING_SAID.items():
        said = (getattr(entry, name), getattr(manifest.defaults, name), nothing)
        found[name] = next((value for value in said if value is not None), None)
    # The gateway tells apart that nothing is said of headers, and that there are none.
    if found["headers"] is None:
        del found["headers"]
    return found
