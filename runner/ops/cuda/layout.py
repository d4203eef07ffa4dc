"""What a step's kernels read, packed into one run of 32-bit integers.

One copy per step brings it to the device. Its parts follow each other:

``token_ids | positions | token_rows | sample_rows | tiles | tables``

Each begins at a multiple of ``ALIGNMENT``: Triton compiles a kernel again for an address that is
not. ``tiles`` has one descriptor per tile, ``TILE_FIELDS`` integers each: first row, tokens,
position of the first token, where its sequence's block table begins in ``tables``, first slot for
the parts of a split context; the rest is unused. A descriptor with 0 tokens stands for a row of
padding, whose result is 0: what happens to be in memory may be infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from runner.batch import AttentionGroup, Batch

# Integers in 16 bytes.
ALIGNMENT = 4

# Five that mean something, and as many as keep every descriptor aligned.
TILE_FIELDS = 8

# The length of a split: long enough that merging costs nothing beside reading 512 tokens, short
# enough that one long decode context still occupies a whole GPU (8 KV heads, 32k: 512 programs).
SPLIT_TOKENS = 512

# A chunk with more query rows (tokens times heads of a group) than this has enough tiles to fill a
# GPU, and its split parts would cost more memory traffic than they save.
MAX_SPLIT_ROWS = 256


@dataclass(frozen=True, slots=True)
class TileShape:
    """How one tile is computed.

    Attributes:
        rows: Query rows, a power of two from 16 on: tokens times the heads of a group.
        keys: Context tokens read at a time.
        num_warps: Warps of a program.
        num_stages: Reads under way at a time.
    """

    rows: int
    keys: int
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True, slots=True)
class TileShapes:
    """The shapes in use.

    Attributes:
        single: Decode: one token.
        short: Chunks up to ``MAX_SPLIT_ROWS``.
        long: Longer chunks.
    """

    single: TileShape
    short: TileShape
    long: TileShape

    @classmethod
    def of(cls, group: int, itemsize: int) -> TileShapes:
        """Return the shapes for a number of heads per KV head and bytes per value."""
        least = max(16, 1 << (group - 1).bit_length())
        if itemsize > 2:
            # float32 is the reference mode: the tiles must fit shared memory, speed is secondary.
            shape = TileShape(max(32, least), 32)
            return cls(TileShape(least, 32), shape, shape)
        return cls(
            TileShape(least, 64, 4, 3),
            TileShape(max(64, least), 64, 4, 3),
            TileShape(max(128, least), 64, 8, 3),
        )


@dataclass(frozen=True, slots=True)
class TileRun:
    """Tiles of one kernel launch.

    Attributes:
        first: Index of the first descriptor.
        count: How many.
        shape: Of each.
        is_split: Whether contexts are split.
        max_splits: Most splits of one.
    """

    first: int
    count: int
    shape: TileShape
    is_split: bool
    max_splits: int


@dataclass(frozen=True, slots=True)
class Layout:
    """One step, packed.

    Attributes:
        values: See the module; int32.
        num_rows: Rows, padding included.
        num_samples: Rows that sample, padding included.
        runs: The launches of attention.
        num_slots: Slots for the parts of split contexts.
    """

    values: npt.NDArray[np.int32]
    num_rows: int
    num_samples: int
    runs: tuple[TileRun, ...]
    num_slots: int

    @property
    def tiles_at(self) -> int:
        """Where the descriptors begin."""
        return 3 * aligned(self.num_rows) + aligned(self.num_samples)

    @property
    def tables_at(self) -> int:
        """Where the block tables begin."""
        return self.tiles_at + TILE_FIELDS * sum(run.count for run in self.runs)


def aligned(count: int) -> int:
    """Return how many integers a part of as many takes."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class _Tiles:
    """Collects the descriptors of one launch."""

    def __init__(self, shape: TileShape, *, is_split: bool) -> None:
        self.fields: list[tuple[int, ...]] = []
        self.shape = shape
        self.is_split = is_split
        self.max_splits = 1

    def add(self, row: int, tokens: int, position: int, table: int, slot: int) -> int:
        """Add a tile; returns the slots it takes."""
        self.fields.append((row, tokens, position, table, slot, 0, 0, 0))
        if not self.is_split:
            return 0
        splits = -(-(position + tokens) // SPLIT_TOKENS)
        self.max_splits = max(self.max_splits, splits)
        return tokens * splits


def lay_out(
    batch: Batch, group: int, shapes: TileShapes, padded_rows: int = 0, most_splits: int = 0
) -> Layout:
    """Pack a step.

    Args:
        batch: The step.
        group: Query heads per KV head.
        shapes: How to cut it into tiles.
        padded_rows: For a step of single tokens that all sample: rows to pad it to.
        most_splits: Of a padded step: what its launch is made for, whatever this step has.
    """
    singles = _Tiles(shapes.single, is_split=True)
    short = _Tiles(shapes.short, is_split=True)
    long = _Tiles(shapes.long, is_split=False)
    tables: list[npt.NDArray[np.int64]] = []
    table_at = slot_at = 0
    for first_row, num_tokens, end, table in sequences(batch.groups):
        if num_tokens == 1:
            tiles = singles
        else:
            tiles = short if num_tokens * group <= MAX_SPLIT_ROWS else long
        step = 1 if tiles is singles else tiles.shape.rows // group
        for token in range(0, num_tokens, step):
            count = min(step, num_tokens - token)
            position = end - num_tokens + token
            slot_at += tiles.add(first_row + token, count, position, table_at, slot_at)
        tables.append(table)
        table_at += len(table)
    rows = len(batch.token_ids)
    padding = max(0, padded_rows - rows)
    singles.fields += [(rows + at, *[0] * (TILE_FIELDS - 1)) for at in range(padding)]
    singles.max_splits = max(singles.max_splits, most_splits)
    used = [tiles for tiles in (singles, short, long) if tiles.fields]
    samples = np.arange(padded_rows) if padded_rows else batch.sample_rows.numpy()
    parts = [
        _part(batch.token_ids.numpy(), padding),
        _part(batch.positions.numpy(), padding),
        # Layer 0's rows are keys and values in turn; the kernels know the rest from the keys'.
        _part(batch.token_rows[0][::2].numpy(), padding, -1),
        _part(samples, 0),
        np.array([fields for tiles in used for fields in tiles.fields]).reshape(-1),
        *tables,
    ]
    return Layout(
        values=np.concatenate(parts).astype(np.int32),
        num_rows=rows + padding,
        num_samples=len(samples),
        runs=tuple(_runs(used)),
        num_slots=slot_at,
    )


def _part(
    values: npt.NDArray[np.int64], padding: int, padding_value: int = 0
) -> npt.NDArray[np.int64]:
    """Return values with their padding and what aligns the next part."""
    rows = len(values) + padding
    return np.pad(values, (0, aligned(rows) - len(values)), constant_values=padding_value)


def _runs(used: list[_Tiles]) -> Iterator[TileRun]:
    first = 0
    for tiles in used:
        count = len(tiles.fields)
        yield TileRun(first, count, tiles.shape, tiles.is_split, tiles.max_splits)
        first += count


def sequences(
    groups: list[AttentionGroup],
) -> Iterator[tuple[int, int, int, npt.NDArray[np.int64]]]:
    """Yield first row, tokens, end of context and block table of every sequence, rows in order."""
    for group in groups:
        num_tokens = (group.rows.stop - group.rows.start) // len(group.ends)
        for at, (end, table) in enumerate(zip(group.ends.tolist(), group.tables, strict=True)):
            yield group.rows.start + at * num_tokens, num_tokens, end, table
