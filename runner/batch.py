"""One step's work as index tensors: which tokens to compute, where KV goes, what it reads.

Everything a forward pass needs in every layer is computed here once per step, for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import numpy.typing as npt

# Decode rows share an attention call, padded to the longest, while the shortest has at least
# this part of its blocks: below, the padding costs more than another call.
_MIN_FILL = 0.5


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence to compute in this step.

    Attributes:
        token_ids: Neighbouring tokens, at least one.
        start: Position of the first.
        blocks: The sequence's block table, covering at least ``start + len(token_ids)`` tokens.
            Not copied: must not change until the step has run.
        samples: Whether the logits after the last token are wanted.
        owner: Stands for the sequence as long as its earlier tokens stay as they are; lets its
            KV be kept at hand between steps. None if that is not wanted.
        adapter: Name of the LoRA adapter to compute with; empty for the base model.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    samples: bool
    owner: Hashable = None
    adapter: str = ""

    @property
    def end(self) -> int:
        """Tokens of context after this step."""
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class AttentionGroup:
    """Neighbouring rows whose attention is one call.

    Attributes:
        rows: Slice of the step's rows: one row per sequence, or the tokens of one chunk.
        is_chunk: Whether it is a prefill chunk.
        owners: See ``Chunk.owner``; empty for a chunk.
        ends: Tokens of context of each sequence. Shape: [sequences].
        context: The largest of ``ends``.
        tables: Block tables, padded with block 0. Shape: [sequences, blocks].
        masks: By window, what ``ops/masks.py`` made for this step.
    """

    rows: slice
    is_chunk: bool
    owners: tuple[Hashable, ...]
    ends: npt.NDArray[np.int64]
    context: int
    tables: npt.NDArray[np.int64]
    masks: dict[int, torch.Tensor | None] = field(default_factory=dict)


@dataclass(slots=True)
class Batch:
    """A step ready to run.

    Attributes:
        token_ids: Shape: [rows].
        positions: Shape: [rows].
        token_rows: For each layer, what ``KvPool.write`` takes.
        groups: Cover all rows in order.
        sample_rows: Rows whose logits are wanted, in the order of ``order``. Shape: [samples].
        order: For each logits row, the index of its chunk as given.
        adapter_rows: Rows of each adapter in use.
        adapter_samples: The same among the rows that sample.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    token_rows: Sequence[torch.Tensor]
    groups: list[AttentionGroup] = field(default_factory=list)
    sample_rows: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    order: list[int] = field(default_factory=list)
    adapter_rows: dict[str, torch.Tensor] = field(default_factory=dict)
    adapter_samples: dict[str, torch.Tensor] = field(default_factory=dict)


class BatchBuilder:
    """Makes batches for one model and pool."""

    def __init__(self, num_layers: int, block_size: int) -> None:
        self._num_layers = num_layers
        self._block_size = block_size
        self._layers = np.arange(num_layers, dtype=np.int64)[:, None]

    def build(self, chunks: Sequence[Chunk]) -> Batch:
        """Lay out ``chunks``: single tokens first, longest context first, then longer chunks."""
        singles = [at for at, chunk in enumerate(chunks) if len(chunk.token_ids) == 1]
        singles.sort(key=lambda at: -chunks[at].end)
        longer = [at for at, chunk in enumerate(chunks) if len(chunk.token_ids) > 1]
        order = singles + longer
        ordered = [chunks[at] for at in order]
        lengths = np.array([len(chunk.token_ids) for chunk in ordered])
        ends = np.cumsum(lengths)
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in ordered])
        batch = Batch(
            token_ids=torch.tensor([token for chunk in ordered for token in chunk.token_ids]),
            positions=torch.from_numpy(positions),
            token_rows=self._token_rows(ordered, lengths, positions),
        )
        batch.groups = self._single_groups(ordered[: len(singles)])
        for chunk, end in zip(ordered[len(singles) :], ends[len(singles) :], strict=True):
            batch.groups.append(self._chunk_group(chunk, int(end)))
        wanted = [at for at, chunk in enumerate(ordered) if chunk.samples]
        batch.sample_rows = torch.from_numpy(ends[wanted] - 1)
        batch.order = [order[at] for at in wanted]
        if any(chunk.adapter for chunk in ordered):
            batch.adapter_rows = _rows_by_adapter(ordered, lengths)
            sampling = [ordered[at] for at in wanted]
            batch.adapter_samples = _rows_by_adapter(sampling, np.ones(len(wanted), np.int64))
        return batch

    def _token_rows(
        self, chunks: Sequence[Chunk], lengths: npt.NDArray[np.int64], at: npt.NDArray[np.int64]
    ) -> Sequence[torch.Tensor]:
        size = self._block_size
        firsts = [chunk.start // size for chunk in chunks]
        touched = [
            chunk.blocks[first : (chunk.end - 1) // size + 1]
            for chunk, first in zip(chunks, firsts, strict=True)
        ]
        # Where each chunk's touched blocks begin in the joined list, less its first block index.
        offsets = np.cumsum([0, *(len(blocks) for blocks in touched[:-1])]) - firsts
        joined = np.array([block for blocks in touched for block in blocks], dtype=np.int64)
        blocks = joined[at // size + np.repeat(offsets, lengths)]
        keys = blocks * (self._num_layers * 2 * size) + at % size
        both = np.stack((keys, keys + size), axis=1).reshape(1, -1)
        return torch.from_numpy(both + self._layers * (2 * size)).unbind(0)

    def _single_groups(self, chunks: Sequence[Chunk]) -> list[AttentionGroup]:
        groups = []
        first = 0
        while first < len(chunks):
            longest = chunks[first].end
            last = first
            while last < len(chunks) and chunks[last].end >= longest * _MIN_FILL:
                last += 1
            groups.append(self._single_group(chunks[first:last], slice(first, last)))
            first = last
        return groups

    def _single_group(self, chunks: Sequence[Chunk], rows: slice) -> AttentionGroup:
        contexts = np.array([chunk.end for chunk in chunks])
        context = int(contexts[0])
        num_blocks = -(-context // self._block_size)
        tables = np.zeros((len(chunks), num_blocks), dtype=np.int64)
        for table, chunk in zip(tables, chunks, strict=True):
            used = min(num_blocks, len(chunk.blocks))
            table[:used] = chunk.blocks[:used]
        owners = tuple(chunk.owner for chunk in chunks)
        return AttentionGroup(rows, False, owners, contexts, context, tables)

    def _chunk_group(self, chunk: Chunk, end_row: int) -> AttentionGroup:
        num_blocks = -(-chunk.end // self._block_size)
        tables = np.array([chunk.blocks[:num_blocks]], dtype=np.int64)
        rows = slice(end_row - len(chunk.token_ids), end_row)
        return AttentionGroup(rows, True, (), np.array([chunk.end]), chunk.end, tables)


def _rows_by_adapter(
    chunks: Sequence[Chunk], lengths: npt.NDArray[np.int64]
) -> dict[str, torch.Tensor]:
    """Return the rows of every adapter in use, chunk ``i`` having ``lengths[i]`` rows."""
    names = np.repeat(np.array([chunk.adapter for chunk in chunks], dtype=object), lengths)
    adapters = dict.fromkeys(chunk.adapter for chunk in chunks if chunk.adapter)
    return {name: torch.from_numpy(np.flatnonzero(names == name)) for name in adapters}
