# mypy: ignore-errors
# Triton's language is compiled and not run: its types are not Python's.
"""What happens to each row by itself: norms, rope with the store into the pool, silu."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(out, rows, scale, epsilon, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Divide each row by its root mean square and scale it. Grid: (rows,)."""
    first = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, TILE)
    is_in = at < WIDTH
    row = tl.load(rows + first + at, mask=is_in, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(row * row, 0) / WIDTH + epsilon)
    factors = tl.load(scale + at, mask=is_in, other=0.0).to(tl.float32) * factor
    tl.store(out + first + at, (row * factors).to(out.dtype.element_ty), mask=is_in)


# ``layer`` changes with every call: no variant is compiled for it.
@triton.jit(do_not_specialize=["layer"])
def rope_write_kernel(
    qkv,
    cosines,
    sines,
    head_norm,
    kv,
    positions,
    token_rows,
    layer,
    epsilon,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Norm and rotate queries and keys in place; keys and values go into the pool.

    Grid: (rows, heads / TILE_HEADS). The pool is seen as tokens of kv_heads * dim values, a
    layer's keys and values being BLOCK_SIZE of them each; ``token_rows`` are those of layer 0's
    keys, negative for a row that is not stored.
    """
    row = tl.program_id(0)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    half = tl.arange(0, TILE)
    total = NUM_HEADS + 2 * NUM_KV_HEADS
    is_in = (head < total)[:, None] & (half < HALF)[None, :]
    is_turned = (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
    wide_row = row.to(tl.int64)
    place = (wide_row * total + head)[:, None] * (2 * HALF) + half[None, :]
    left = tl.load(qkv + place, mask=is_in, other=0.0).to(tl.float32)
    right = tl.load(qkv + place + HALF, mask=is_in, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = (tl.sum(left * left, 1) + tl.sum(right * right, 1)) / (2 * HALF)
        factor = (1.0 / tl.sqrt(mean + epsilon))[:, None]
        scale = head[:, None] * (2 * HALF) + half[None, :]
        is_scaled = is_in & is_turned
        left_scale = tl.load(head_norm + scale, mask=is_scaled, other=0.0).to(tl.float32)
        right_scale = tl.load(head_norm + scale + HALF, mask=is_scaled, other=0.0).to(tl.float32)
        left = tl.where(is_turned, left * factor * left_scale, left)
        right = tl.where(is_turned, right * factor * right_scale, right)
    angle = tl.load(positions + row).to(tl.int64) * HALF + half
    cosine = tl.load(cosines + angle, mask=half < HALF, other=0.0)[None, :]
    sine = tl.load(sines + angle, mask=half < HALF, other=0.0)[None, :]
    new_left = tl.where(is_turned, left * cosine - right * sine, left).to(qkv.dtype.element_ty)
    new_right = tl.where(is_turned, right * cosine + left * sine, right).to(qkv.dtype.element_ty)
    tl.store(qkv + place, new_left, mask=is_in & is_turned)
    tl.store(qkv + place + HALF, new_right, mask=is_in & is_turned)
    # The same for all heads.
    token = tl.load(token_rows + row + head * 0).to(tl.int64)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    kv_head = tl.where(is_value, head - NUM_HEADS - NUM_KV_HEADS, head - NUM_HEADS)
    # A layer is 2 * BLOCK_SIZE tokens: its keys, then its values.
    kept = token + layer * (2 * BLOCK_SIZE) + tl.where(is_value, BLOCK_SIZE, 0)
    target = (kept * NUM_KV_HEADS + kv_head)[:, None] * (2 * HALF) + half[None, :]
    is_kept = is_in & (head >= NUM_HEADS)[:, None] & (token >= 0)[:, None]
    tl.store(kv + target, new_left, mask=is_kept)
    tl.store(kv + target + HALF, new_right, mask=is_kept)


@triton.jit
def silu_mul_kernel(out, gate_up, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Multiply silu of the left half with the right half. Grid: (rows, width / TILE)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_in = at < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + at, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + at, mask=is_in, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + at, product.to(out.dtype.element_ty), mask=is_in)
