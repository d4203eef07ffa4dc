# mypy: ignore-errors
# Triton's language is compiled and not run: its types are not Python's.
"""Attention over the paged pool: one kernel for prefill chunks and decode, one that merges splits.

A tile is some neighbouring tokens of one sequence times the query heads that share a KV head, so
that one decode token of a grouped model fills the rows a tensor core multiplies anyway. A context
is cut at fixed absolute positions (every ``SPLIT`` tokens) and never by how large the batch is:
what a program computes for a row, and the order in which the parts are merged, depend on that
row's own sequence alone. How many programs share the splits changes nothing but the time.

Source: online softmax as in FlashAttention (Dao et al., arXiv 2205.14135); splitting the keys of a
decode step as in Flash-Decoding; fixed splits for results that do not depend on the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What a tile descriptor holds, in this order; see ``layout.py``.
TILE_FIELDS = tl.constexpr(8)


# ``layer`` changes with every call: no variant is compiled for it.
@triton.jit(do_not_specialize=["layer"])
def attend_kernel(
    out,
    parts,
    stats,
    qkv,
    kv,
    tables,
    tiles,
    layer,
    scale_log2,
    qkv_stride,
    out_stride,
    block_stride,
    layer_stride,
    kind_stride,
    token_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Attend one tile of queries to its sequence's context.

    Grid: (tiles, kv_heads, programs that share the splits). Writes ``out`` [rows, heads * dim], or
    with IS_SPLIT unfinished sums into ``parts`` [slots, heads, dim] and their maximum and weight
    into ``stats`` [slots, heads, 2].
    """
    at = tiles + tl.program_id(0) * TILE_FIELDS
    first_row = tl.load(at)
    num_tokens = tl.load(at + 1)
    first_position = tl.load(at + 2)
    table = tables + tl.load(at + 3)
    first_slot = tl.load(at + 4)
    kv_head = tl.program_id(1)
    if num_tokens > 0:
        row = tl.arange(0, TILE_ROWS)
        token = row // GROUP
        head = kv_head * GROUP + row % GROUP
        is_row = token < num_tokens
        position = first_position + token
        dim = tl.arange(0, DIM)
        is_dim = dim < HEAD_DIM
        wide_row = (first_row + token).to(tl.int64)
        queries = tl.load(
            qkv + wide_row[:, None] * qkv_stride + (head * HEAD_DIM)[:, None] + dim[None, :],
            mask=is_row[:, None] & is_dim[None, :],
            other=0.0,
        )
        end = first_position + num_tokens
        # The first key that any row of the tile may see.
        low = 0
        if WINDOW > 0:
            low = tl.maximum(first_position - WINDOW + 1, 0)
        num_splits = 1
        if IS_SPLIT:
            num_splits = (end + SPLIT - 1) // SPLIT
        kv += layer.to(tl.int64) * layer_stride + kv_head * HEAD_DIM
        for split in range(tl.program_id(2), num_splits, tl.num_programs(2)):
            begin = low // TILE_KEYS * TILE_KEYS
            stop = end
            if IS_SPLIT:
                begin = tl.maximum(begin, split * SPLIT)
                stop = tl.minimum(end, split * SPLIT + SPLIT)
            top = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
            weight = tl.zeros((TILE_ROWS,), tl.float32)
            mixed = tl.zeros((TILE_ROWS, DIM), tl.float32)
            for start in range(begin, stop, TILE_KEYS):
                key = start + tl.arange(0, TILE_KEYS)
                is_key = key < stop
                block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
                place = block * block_stride + (key % BLOCK_SIZE) * token_stride
                there = place[:, None] + dim[None, :]
                is_there = is_key[:, None] & is_dim[None, :]
                keys = tl.load(kv + there, mask=is_there, other=0.0)
                scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
                seen = is_key[None, :] & (key[None, :] <= position[:, None])
                if WINDOW > 0:
                    seen = seen & (position[:, None] - key[None, :] < WINDOW)
                scores = tl.where(seen, scores, float("-inf"))
                new_top = tl.maximum(top, tl.max(scores, 1))
                # A row that has seen nothing yet: anything finite keeps NaN away.
                base = tl.where(new_top == float("-inf"), 0.0, new_top)
                shares = tl.exp2(scores - base[:, None])
                fade = tl.exp2(top - base)
                weight = weight * fade + tl.sum(shares, 1)
                values = tl.load(kv + kind_stride + there, mask=is_there, other=0.0)
                mixed = mixed * fade[:, None]
                mixed += tl.dot(shares.to(values.dtype), values, input_precision="ieee")
                top = new_top
            if IS_SPLIT:
                slot = (first_slot + token * num_splits + split).to(tl.int64) * NUM_HEADS + head
                tl.store(
                    parts + slot[:, None] * HEAD_DIM + dim[None, :],
                    mixed,
                    mask=is_row[:, None] & is_dim[None, :],
                )
                tl.store(stats + slot * 2, top, mask=is_row)
                tl.store(stats + slot * 2 + 1, weight, mask=is_row)
            else:
                tl.store(
                    out
                    + wide_row[:, None] * out_stride
                    + (head * HEAD_DIM)[:, None]
                    + dim[None, :],
                    (mixed / weight[:, None]).to(out.dtype.element_ty),
                    mask=is_row[:, None] & is_dim[None, :],
                )


@triton.jit
def merge_kernel(
    out,
    parts,
    stats,
    tiles,
    out_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Merge the splits of a tile's tokens, first split first. Grid: (tiles, heads).

    Inputs and output as of ``attend_kernel``.
    """
    at = tiles + tl.program_id(0) * TILE_FIELDS
    first_row = tl.load(at)
    num_tokens = tl.load(at + 1)
    end = tl.load(at + 2) + num_tokens
    first_slot = tl.load(at + 4)
    head = tl.program_id(1)
    num_splits = (end + SPLIT - 1) // SPLIT
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    if num_tokens == 0:
        nothing = tl.zeros((DIM,), tl.float32).to(out.dtype.element_ty)
        tl.store(out + first_row.to(tl.int64) * out_stride + head * HEAD_DIM + dim, nothing, is_dim)
    for token in range(num_tokens):
        slot = (first_slot + token * num_splits).to(tl.int64) * NUM_HEADS + head
        top = tl.load(stats + slot * 2)
        weight = tl.load(stats + slot * 2 + 1)
        mixed = tl.load(parts + slot * HEAD_DIM + dim, mask=is_dim, other=0.0)
        for _ in range(1, num_splits):
            slot += NUM_HEADS
            other_top = tl.load(stats + slot * 2)
            other_weight = tl.load(stats + slot * 2 + 1)
            other = tl.load(parts + slot * HEAD_DIM + dim, mask=is_dim, other=0.0)
            new_top = tl.maximum(top, other_top)
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            fade = tl.exp2(top - base)
            other_fade = tl.exp2(other_top - base)
            weight = weight * fade + other_weight * other_fade
            mixed = mixed * fade + other * other_fade
            top = new_top
        tl.store(
            out + (first_row + token).to(tl.int64) * out_stride + head * HEAD_DIM + dim,
            (mixed / weight).to(out.dtype.element_ty),
            mask=is_dim,
        )
