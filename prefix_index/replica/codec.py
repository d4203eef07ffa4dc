"""Bytes of what is shared: the state of one block, a delta, and where a worker's events stand.

Only our own hashes, counts and engine hashes: no token, no text, no salt. Values come from a server
that others can write to, so every length is checked and anything odd is a ``SharedValueError``.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from prefix_index.blocks import BlockHash
from prefix_index.events import EngineHash

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


HASH_BYTES: Final = 16
# One bit says that copies follow (else: one copy in GPU memory), two what kind of name.
_HAS_COPIES: Final = 4
_NO_NAME, _SIGNED, _UNSIGNED, _BYTES = range(4)
_KINDS: Final = 3
_MAX_FLAG: Final = 7
_U64: Final = Struct("<Q")
_I64: Final = Struct("<q")
_I64_END: Final = 1 << 63
# Engines name blocks by digests of 32 bytes at most; a value must stay within one length byte.
_MAX_NAME_BYTES: Final = 128
_HEAD: Final = Struct("<BQQQ")
_IS_RESET: Final = 1
_IS_SILENT: Final = 2


class SharedValueError(ValueError):
    """A value in Redis is not what this version writes."""


class State(NamedTuple):
    """What a worker holds of one block.

    Attributes:
        parent: Block before it, or a root.
        copies: Packed copies, see ``Index.copies``; 0 = gone.
        name: The engine's hash, if known.
    """

    parent: BlockHash
    copies: int
    name: EngineHash | None


GONE: Final = State(bytes(HASH_BYTES), 0, None)


class Head(NamedTuple):
    """Where a worker's events stand.

    Attributes:
        epoch: Counts the times that everything was void.
        next_sequence: Batch to go on with; 0 = only from the first one.
        digest: Of the batch before it.
        is_reset: Everything before this delta is void.
        is_silent: The worker stopped telling; its cache is modelled.
    """

    epoch: int = 0
    next_sequence: int = 0
    digest: int = 0
    is_reset: bool = False
    is_silent: bool = False


def pack_state(parent: BlockHash, copies: int, name: EngineHash | None) -> bytes:
    """Return the value of a held block."""
    if isinstance(name, bytes):
        kind, tail = (_BYTES, name) if len(name) <= _MAX_NAME_BYTES else (_NO_NAME, b"")
    elif name is None:
        kind, tail = _NO_NAME, b""
    elif -_I64_END <= name < _I64_END:
        kind, tail = _SIGNED, _I64.pack(name)
    elif 0 <= name < 2 * _I64_END:
        kind, tail = _UNSIGNED, _U64.pack(name)
    else:
        kind, tail = _NO_NAME, b""
    if copies == 1:
        return bytes((kind,)) + parent + tail
    return bytes((kind | _HAS_COPIES,)) + parent + _U64.pack(copies) + tail


def unpack_state(value: object) -> State:
    """Return what ``pack_state`` packed.

    Raises:
        SharedValueError: If it is anything else.
    """
    if not isinstance(value, bytes) or len(value) <= HASH_BYTES or value[0] > _MAX_FLAG:
        raise SharedValueError("no block state")
    flag, parent, rest = value[0], value[1 : 1 + HASH_BYTES], value[1 + HASH_BYTES :]
    copies = 1
    if flag & _HAS_COPIES:
        if len(rest) < _U64.size:
            raise SharedValueError("block state is cut off")
        copies, rest = _U64.unpack_from(rest)[0], rest[_U64.size :]
        if not copies:
            raise SharedValueError("block state without a copy")
    kind = flag & _KINDS
    if kind == _BYTES:
        if not 0 < len(rest) <= _MAX_NAME_BYTES:
            raise SharedValueError("block name of a wrong length")
        return State(parent, copies, rest)
    if len(rest) != (0 if kind == _NO_NAME else _U64.size):
        raise SharedValueError("block name of a wrong length")
    if kind == _NO_NAME:
        return State(parent, copies, None)
    return State(parent, copies, (_I64 if kind == _SIGNED else _U64).unpack(rest)[0])


def unpack_plain(value: bytes) -> tuple[BlockHash, EngineHash] | None:
    """Return parent and name of the commonest states; None for all others, good or not.

    One copy in GPU memory, with a name that is a digest or a signed number.
    """
    size = len(value) - HASH_BYTES - 1
    if not 0 < size <= _MAX_NAME_BYTES:
        return None
    if value[0] == _BYTES:
        return value[1 : 1 + HASH_BYTES], value[1 + HASH_BYTES :]
    if value[0] == _SIGNED and size == _I64.size:
        return value[1 : 1 + HASH_BYTES], _I64.unpack_from(value, 1 + HASH_BYTES)[0]
    return None


def pack_delta(states: Mapping[BlockHash, bytes]) -> bytes:
    """Return blocks with their packed states, an empty one for a block that is gone."""
    return b"".join([block + bytes((len(value),)) + value for block, value in states.items()])


def unpack_delta(data: object) -> Iterator[tuple[BlockHash, State]]:
    """Iterate over what ``pack_delta`` packed.

    Raises:
        SharedValueError: If it is anything else; what came before the fault was yielded.
    """
    if not isinstance(data, bytes):
        raise SharedValueError("no delta")
    at, end = 0, len(data)
    while at < end:
        start = at + HASH_BYTES + 1
        if start > end:
            raise SharedValueError("delta is cut off")
        block, at = data[at : at + HASH_BYTES], start + data[start - 1]
        if at > end:
            raise SharedValueError("delta is cut off")
        yield block, unpack_state(data[start:at]) if at > start else GONE


def pack_head(head: Head) -> bytes:
    """Return a delta's head."""
    flags = head.is_reset * _IS_RESET | head.is_silent * _IS_SILENT
    return _HEAD.pack(flags, head.epoch, head.next_sequence, head.digest)


def unpack_head(data: object) -> Head:
    """Return what ``pack_head`` packed.

    Raises:
        SharedValueError: If it is anything else.
    """
    if not isinstance(data, bytes) or len(data) != _HEAD.size:
        raise SharedValueError("no head")
    flags, epoch, next_sequence, digest = _HEAD.unpack(data)
    if flags & ~(_IS_RESET | _IS_SILENT):
        raise SharedValueError("unknown flags")
    return Head(epoch, next_sequence, digest, bool(flags & _IS_RESET), bool(flags & _IS_SILENT))


def entry_order(entry_id: bytes) -> tuple[int, int]:
    """Return a stream entry's id as numbers that sort.

    Raises:
        SharedValueError: If it is no id.
    """
    milliseconds, _, counter = entry_id.partition(b"-")
    if not (milliseconds.isdigit() and counter.isdigit()):
        raise SharedValueError("no stream id")
    return int(milliseconds), int(counter)
