"""Which text of a prompt has been seen in other conversations: known by hashes, no text is kept.

A text is cut where its own content says so, so that a document has the same chunks wherever it
stands. Two bounded maps per tenant then tell recurring text from a conversation that goes on:

* *nodes*: a prompt up to some chunk -> the chunk that followed it. Another one behind the same
  beginning: the beginning is shared by different conversations.
* *places*: a chunk -> the prompt before it. Another one before the same chunk: the chunk recurs
  behind text that changes, so that no prefix cache can reuse it.

Not thread safe: one event loop only.
"""

from __future__ import annotations

import re
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# About 160 bytes each: 32 MB when full, for 25 million characters of distinct text.
MAX_ENTRIES = 200_000
# A chunk ends at the first line or sentence that is over MIN characters away and whose hash says
# so (every second one), or over MAX. Small enough to find a page of text behind a greeting.
_MIN_CHUNK_CHARS = 240
_MAX_CHUNK_CHARS = 960
# Only so much of one text is cut finely; what follows is one chunk.
_MAX_CHUNKED_CHARS = 131_072
_BREAK = re.compile(r"\n|[.!?] ")
# Marked documents are chunks of their own, so that each is found whole.
_MARKS = "(?:doc|document|source|passage|chunk|context)"
_BORDER = re.compile(rf"</{_MARKS}>|(?=<{_MARKS}[ _>-])")
# More of them are a markup language, and no list of documents.
_MAX_BORDERS = 512
# No digest is negative, and hash() never returns -1.
_SEVERAL = -1


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring recurring chunks of one text.

    Attributes:
        start_char: First character in the text.
        end_char: One behind the last.
        is_moved: Whether it was seen behind other text than here, and not as a shared beginning.
    """

    start_char: int
    end_char: int
    is_moved: bool


@dataclass(slots=True)
class _Chunk:
    """One chunk of one prompt: where it is, what it says, what stands before and up to it."""

    message: int
    start: int
    end: int
    digest: int
    before: int
    after: int


class Recurrence:
    """The memory of one pool.

    Args:
        max_entries: Bound on the entries of both maps of all tenants. Beyond it the tenant that has
            most forgets its oldest, so that a flood of one tenant is its own loss.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._tenants: dict[str, _Tenant] = {}
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    def observe(self, tenant: str, texts: Sequence[tuple[str, str]]) -> None:
        """Remember a prompt; a repeated call changes nothing.

        About 1 us per message that stood there before, and 15 us per KB of other text.

        Args:
            tenant: Whose prompt it is; tenants never meet.
            texts: Role and text of each message in order.
        """
        memory = self._tenants.get(tenant)
        if memory is None:
            memory = self._tenants[tenant] = _Tenant()
        before = len(memory)
        memory.observe(_seed(tenant), texts)
        self._num_entries += len(memory) - before
        while self._num_entries > self._max_entries:
            self._forget()

    def recurring(self, tenant: str, texts: Sequence[tuple[str, str]]) -> list[list[Run]]:
        """Return the recurring runs of each text of a prompt. Changes nothing."""
        runs: list[list[Run]] = [[] for _ in texts]
        memory = self._tenants.get(tenant)
        if memory is None:
            return runs
        chunks = list(_chunks(_seed(tenant), texts))
        shared = memory.num_shared(chunks)
        moved = memory.moved(chunks)
        for at, chunk in enumerate(chunks):
            if at < shared or chunk.digest in moved:
                _extend(runs[chunk.message], chunk, is_moved=at >= shared)
        return runs

    def shared_messages(self, tenant: str, texts: Sequence[tuple[str, str]]) -> int:
        """Return how many leading messages different conversations have in common."""
        memory = self._tenants.get(tenant)
        if memory is None:
            return 0
        chunks = list(_chunks(_seed(tenant), texts))
        shared = memory.num_shared(chunks)
        if not shared:
            return 0
        return chunks[shared].message if shared < len(chunks) else len(texts)

    def _forget(self) -> None:
        name = max(self._tenants, key=lambda tenant: len(self._tenants[tenant]))
        memory = self._tenants[name]
        # Many at once: finding the largest tenant looks at all of them.
        self._num_entries -= memory.forget(max(1, len(memory) // 8))
        if not len(memory):
            del self._tenants[name]


class _Tenant:
    """What is known of one tenant's prompts."""

    __slots__ = ("_messages", "_nodes", "_places")

    def __init__(self) -> None:
        self._nodes: OrderedDict[int, int] = OrderedDict()
        self._places: OrderedDict[int, int] = OrderedDict()
        # A message behind its beginning -> its first chunk, and the prompt up to its end: what
        # was observed once need not be cut again.
        self._messages: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes) + len(self._places) + len(self._messages)

    def observe(self, seed: int, texts: Sequence[tuple[str, str]]) -> None:
        end = before = seed
        for role, text in texts:
            data = text.encode("utf-8", "surrogatepass")
            before = _chain(before, _role(role, seed))
            if not data:
                continue
            key = _chain(before, xxh3_64_intdigest(data, seed))
            known = self._messages.get(key)
            if known is None:
                known = self._messages[key] = self._observe_message(before, text, seed)
            else:
                self._messages.move_to_end(key)
            first, before = known
            _note(self._nodes, end, first)
            end = before

    def _observe_message(self, before: int, text: str, seed: int) -> tuple[int, int]:
        chunks = list(_cut(0, text, before, seed))
        for at, digest in enumerate(chunk.digest for chunk in chunks[1:]):
            _note(self._nodes, chunks[at].after, digest)
        for digest, at in _firsts(chunks).items():
            _note(self._places, digest, chunks[at].before)
        return chunks[0].digest, chunks[-1].after

    def num_shared(self, chunks: list[_Chunk]) -> int:
        """Return how many leading chunks are followed by something else in another prompt."""
        for at in range(len(chunks) - 1, -1, -1):
            follower = self._nodes.get(chunks[at].after)
            if follower is None:
                continue
            if follower == _SEVERAL or (at + 1 < len(chunks) and follower != chunks[at + 1].digest):
                return at + 1
        return 0

    def moved(self, chunks: list[_Chunk]) -> set[int]:
        """Return the chunks that were seen behind other text."""
        found = set()
        for digest, at in _firsts(chunks).items():
            place = self._places.get(digest)
            if place is not None and place != chunks[at].before:
                found.add(digest)
        return found

    def forget(self, num_entries: int) -> int:
        maps: list[OrderedDict[int, Any]] = [self._nodes, self._places, self._messages]
        for _ in range(num_entries):
            max(maps, key=len).popitem(last=False)
        return num_entries


def _note(entries: OrderedDict[int, int], key: int, value: int) -> None:
    known = entries.get(key)
    if known is None:
        entries[key] = value
        return
    if known != value and known != _SEVERAL:
        entries[key] = _SEVERAL
    entries.move_to_end(key)


def _firsts(chunks: list[_Chunk]) -> dict[int, int]:
    """Return where each chunk stands first: text that repeats itself does not move."""
    firsts: dict[int, int] = {}
    for at, chunk in enumerate(chunks):
        firsts.setdefault(chunk.digest, at)
    return firsts


def _extend(runs: list[Run], chunk: _Chunk, *, is_moved: bool) -> None:
    start = chunk.start
    if runs and runs[-1].end_char == start and runs[-1].is_moved == is_moved:
        start = runs.pop().start_char
    runs.append(Run(start, chunk.end, is_moved))


def _chunks(seed: int, texts: Sequence[tuple[str, str]]) -> Iterator[_Chunk]:
    """Cut a prompt into chunks; the role is part of what stands before."""
    before = seed
    for message, (role, text) in enumerate(texts):
        before = _chain(before, _role(role, seed))
        for chunk in _cut(message, text, before, seed):
            yield chunk
            before = chunk.after


def _cut(message: int, text: str, before: int, seed: int) -> Iterator[_Chunk]:
    start = 0
    for end in chunk_ends(text):
        digest = _digest(text[start:end], seed)
        after = _chain(before, digest)
        yield _Chunk(message, start, end, digest, before, after)
        before = after
        start = end


def chunk_ends(text: str) -> list[int]:
    """Return where each chunk of a text ends; the last line starts a chunk of its own.

    The last line, since that is where the question stands below a pasted document.
    """
    ends: list[int] = []
    start = 0
    for border in _borders(text):
        while (end := _chunk_end(text, start, min(border, _MAX_CHUNKED_CHARS))) is not None:
            ends.append(end)
            start = end
        if border > start:
            ends.append(border)
            start = border
    return ends


def _borders(text: str) -> list[int]:
    """Return where chunks end in any case: around marked documents, before the last line."""
    borders = {len(text), text.rstrip().rfind("\n") + 1}
    if "<" in text:
        marks = _BORDER.finditer(text, 0, _MAX_CHUNKED_CHARS)
        borders.update(mark.end() for mark, _ in zip(marks, range(_MAX_BORDERS), strict=False))
    return sorted(borders)


def _chunk_end(text: str, start: int, border: int) -> int | None:
    """Return where the chunk that starts here ends before a border; None if only there."""
    at = start + _MIN_CHUNK_CHARS
    while at < border and (match := _BREAK.search(text, at, border)):
        at = match.end()
        if at >= border:
            break
        if at - start >= _MAX_CHUNK_CHARS:
            return at
        if zlib.crc32(text[at - 24 : at].encode("utf-8", "surrogatepass")) & 1:
            return at
    return None


def _digest(text: str, seed: int) -> int:
    return xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"), seed)


def _chain(before: int, digest: int) -> int:
    # Python's own tuple hash: of two seeded hashes, and never written anywhere.
    return hash((before, digest))


# A handful of roles per tenant.
@lru_cache(maxsize=16384)
def _role(role: str, seed: int) -> int:
    return _digest(role, seed)


# One entry per tenant in use.
@lru_cache(maxsize=4096)
def _seed(tenant: str) -> int:
    name = tenant.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")
