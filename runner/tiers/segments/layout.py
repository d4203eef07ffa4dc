"""The bytes of a segment file: header page, entry table, slots. Pure: no files here.

::

    0              header: magic, version, sizes, number, namespace, crc32; one page
    4096           entry table: num_slots entries of entry_bytes
    data_offset    slots: num_slots x stride_bytes, both page-aligned

An entry names the block in the slot of the same number and holds the checksum of its payload.
A free slot's entry is all zeros. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING
from zlib import crc32

import xxhash

from runner.tiers.types import BlockRecord

if TYPE_CHECKING:
    from runner.kvkeys import KvKey

# Suits the O_DIRECT alignment of every common disk (512 and 4096) and the kernel's page.
PAGE_BYTES = 4096

# Changes with anything below: files of another version are foreign.
LAYOUT_VERSION = 1

_MAGIC = b"WLKVSEG\n"
# version, entry bytes, slots, block size, number, reserved; block bytes, stride, data offset
_HEADER = struct.Struct("<8s6I3Q32s")
_CRC = struct.Struct("<I")

# key, parent, xxh3-128 of the payload, its length, sequence, depth, state; tokens and crc32 follow
_ENTRY = struct.Struct("<32s32s16sQQII")
_LIVE = 1
# A cache line: an entry never shares one with more neighbours than it must.
_ENTRY_ALIGN = 64

_TOKEN_BYTES = 4


class HeaderError(Exception):
    """A header that is not of this layout; the message says in what it differs."""


class EntryError(Exception):
    """An entry that is neither free nor whole."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a table says of one slot.

    Attributes:
        record: The block that the slot holds.
        checksum: xxh3-128 of its payload.
        sequence: Grows with every write of the store: the newest copy of a key wins.
    """

    record: BlockRecord
    checksum: bytes
    sequence: int


def checksum(payload: memoryview) -> bytes:
    """Return the checksum a payload is verified with. Source: xxHash's xxh3, 128 bits."""
    return xxhash.xxh3_128_digest(payload)


def align(num_bytes: int, unit: int) -> int:
    """Return ``num_bytes`` rounded up to a multiple of ``unit``."""
    return -(-num_bytes // unit) * unit


@dataclass(frozen=True)
class SegmentLayout:
    """The sizes of one namespace's segments, and how headers and entries are written and read.

    Attributes:
        namespace: Digest of everything that makes the bytes usable; others' files are foreign.
        block_bytes: Payload of a block.
        block_size: Tokens of a block.
    """

    namespace: KvKey
    block_bytes: int
    block_size: int

    @cached_property
    def stride_bytes(self) -> int:
        """From one slot to the next."""
        return align(self.block_bytes, PAGE_BYTES)

    @cached_property
    def entry_bytes(self) -> int:
        """Of one entry, its packed token ids included."""
        return align(_ENTRY.size + self._token_bytes + _CRC.size, _ENTRY_ALIGN)

    @cached_property
    def free_entry(self) -> bytes:
        """The entry of a free slot."""
        return bytes(self.entry_bytes)

    @cached_property
    def _token_bytes(self) -> int:
        return _TOKEN_BYTES * self.block_size

    def table_bytes(self, num_slots: int) -> int:
        """Return the size of a table."""
        return num_slots * self.entry_bytes

    def data_offset(self, num_slots: int) -> int:
        """Return where the first slot begins."""
        return align(PAGE_BYTES + self.table_bytes(num_slots), PAGE_BYTES)

    def file_bytes(self, num_slots: int) -> int:
        """Return the size of a segment file."""
        return self.data_offset(num_slots) + num_slots * self.stride_bytes

    def slots_within(self, num_bytes: int) -> int:
        """Return how many slots a file of at most ``num_bytes`` has; 0 if not even one."""
        # The table may end within a page, so its rounding is paid for in advance.
        return max(0, (num_bytes - 2 * PAGE_BYTES) // (self.stride_bytes + self.entry_bytes))

    def pack_header(self, number: int, num_slots: int) -> bytes:
        """Return the header page of segment ``number``."""
        fields = self._header_fields(number, num_slots)
        return (fields + _CRC.pack(crc32(fields))).ljust(PAGE_BYTES, b"\0")

    def parse_header(self, page: bytes, number: int) -> int:
        """Return the number of slots of segment ``number``, whose first page this is.

        Raises:
            HeaderError: If it is damaged, or of another namespace, layout or number.
        """
        end = _HEADER.size + _CRC.size
        if len(page) < PAGE_BYTES:
            raise HeaderError(f"it ends after {len(page)} bytes")
        if not page.startswith(_MAGIC):
            raise HeaderError("it is not a segment file")
        if _CRC.pack(crc32(page[: _HEADER.size])) != page[_HEADER.size : end] or any(page[end:]):
            raise HeaderError("its header fails its checksum")
        num_slots: int = _HEADER.unpack_from(page)[3]
        if page[: _HEADER.size] != self._header_fields(number, num_slots):
            raise HeaderError("it is of another namespace, layout or segment number")
        return num_slots

    def _header_fields(self, number: int, num_slots: int) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            LAYOUT_VERSION,
            self.entry_bytes,
            num_slots,
            self.block_size,
            number,
            0,
            self.block_bytes,
            self.stride_bytes,
            self.data_offset(num_slots),
            self.namespace,
        )

    def pack_entry(self, entry: Entry) -> bytes:
        """Return the entry as it stands in the table."""
        record = entry.record
        if len(record.tokens) != self._token_bytes:
            raise ValueError(f"{len(record.tokens)} token bytes, expected {self._token_bytes}")
        fields = _ENTRY.pack(
            record.key,
            record.parent,
            entry.checksum,
            self.block_bytes,
            entry.sequence,
            record.depth,
            _LIVE,
        )
        body = (fields + record.tokens).ljust(self.entry_bytes - _CRC.size, b"\0")
        return body + _CRC.pack(crc32(body))

    def parse_entry(self, raw: bytes) -> Entry | None:
        """Return what an entry says, None if its slot is free.

        Raises:
            EntryError: If it is damaged.
        """
        if raw == self.free_entry:
            return None
        body = raw[: -_CRC.size]
        key, parent, digest, length, sequence, depth, state = _ENTRY.unpack_from(raw)
        if (
            _CRC.pack(crc32(body)) != raw[-_CRC.size :]
            or state != _LIVE
            or length != self.block_bytes
        ):
            raise EntryError
        tokens = raw[_ENTRY.size : _ENTRY.size + self._token_bytes]
        return Entry(BlockRecord(key, parent, tokens, depth), digest, sequence)
