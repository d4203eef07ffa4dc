"""Stages of ``device_check.py`` about computing: are the kernels right, and how quick are they."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.device_parts import BLOCK, Machine, gb_s, ms
from runner.batch import BatchBuilder, Chunk

# Heads, KV heads, width: grouped by 4, by 3, and one each.
SHAPES = ((32, 8, 128), (9, 3, 64), (4, 4, 64))
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def correctness(machine: Machine) -> dict[str, Any]:
    """Attention of a mixed batch against softmax by its definition in float64."""
    facts: dict[str, Any] = {}
    shapes = machine.pick(SHAPES, ((4, 1, 16), (3, 1, 16)))
    for (heads, kv_heads, dim), dtype in itertools.product(shapes, TOLERANCES):
        if machine.is_dry and dtype == torch.bfloat16:
            # The interpreter keeps bfloat16 as integers.
            continue
        config = replace(
            machine.config, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, num_layers=2
        )
        check = _Attention(machine, config, dtype)
        name = f"{heads}/{kv_heads}x{dim} {str(dtype).removeprefix('torch.')}"
        facts[name] = check.run()
        if facts[name]["max_error"] > TOLERANCES[dtype] or not facts[name]["alone_is_batched"]:
            raise AssertionError(f"{name}: {facts[name]}")
    return facts


class _Attention:
    def __init__(self, machine: Machine, config: Any, dtype: torch.dtype) -> None:
        self.machine, self.config, self.dtype = machine, config, dtype
        self.ops = machine.ops(config, dtype, with_graphs=False)
        self.pool = self.ops.new_pool(machine.pick(512, 96), BLOCK)
        self._random(self.pool.data)

    def _random(self, tensor: torch.Tensor, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator(tensor.device).manual_seed(seed)
        return tensor.copy_(torch.randn(tensor.shape, device=tensor.device, generator=generator))

    def _table(self, first: int, end: int) -> list[int]:
        count = self.pool.data.shape[0]
        return [(first + 7 * at) % count for at in range(-(-end // BLOCK))]

    def run(self) -> dict[str, Any]:
        longest = self.machine.pick(4000, 1100)
        ends = (longest, 513, 512, 1)
        singles = [Chunk([1], end - 1, self._table(at, end), True) for at, end in enumerate(ends)]
        chunks = [
            Chunk([1] * 21, 30, self._table(5, 51), True),
            Chunk([1] * self.machine.pick(300, 70), 40, self._table(9, 400), True),
        ]
        mixed = self._attend([*singles, *chunks])
        alone = self._attend([singles[1]])
        exact = self._exact([*singles, *chunks])
        # A chunk cut in two: its second part computed by itself.
        cut = self._attend([Chunk([1] * 10, 41, self._table(5, 51), True)])
        return {
            "max_error": float((mixed.double() - exact).abs().max()),
            "alone_is_batched": torch.equal(alone[0], mixed[1]),
            "cut_is_whole": torch.equal(cut, mixed[4 + 11 : 4 + 21]),
        }

    def _qkv(self, positions: torch.Tensor) -> torch.Tensor:
        heads = self.config.num_heads + 2 * self.config.num_kv_heads
        rows = [
            self._random(torch.empty((heads, self.config.head_dim)), int(at)) for at in positions
        ]
        return torch.stack(rows).to(self.machine.device, self.dtype)

    def _attend(self, chunks: list[Chunk]) -> torch.Tensor:
        batch = BatchBuilder(self.config.num_layers, BLOCK).build(chunks)
        step = self.ops.open(batch, self.pool)
        return self.ops.attention(self._qkv(batch.positions), 1, step).cpu()

    def _exact(self, chunks: list[Chunk]) -> torch.Tensor:
        rows = []
        group = self.config.num_heads // self.config.num_kv_heads
        for chunk in chunks:
            blocks = self.pool.data[torch.tensor(chunk.blocks, device=self.pool.data.device), 1]
            halves = blocks.double().transpose(0, 1)
            keys, values = halves.reshape(2, -1, *self.pool.data.shape[4:]).cpu()
            keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
            queries = self._qkv(torch.arange(chunk.start, chunk.end))[:, : self.config.num_heads]
            ends = range(chunk.start + 1, chunk.end + 1)
            for row, end in zip(queries.double().cpu(), ends, strict=True):
                scores = torch.einsum("hd,thd->ht", row, keys[:end]) / self.config.head_dim**0.5
                rows.append(torch.einsum("ht,thd->hd", scores.softmax(-1), values[:end]))
        return torch.stack(rows).reshape(len(rows), -1)


def decode_rate(machine: Machine) -> dict[str, Any]:
    """GB of KV read per second by decode attention, over tile shapes and batches."""
    from runner.ops.cuda.layout import TileShape, TileShapes

    facts: dict[str, Any] = {}
    config = replace(machine.config, num_layers=1)
    dtype = machine.pick(torch.bfloat16, torch.float32)
    batches = machine.pick(((1, 32_768), (8, 8192), (64, 8192)), ((2, 600),))
    tiles = machine.pick(
        [(32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 3)], [(32, 4, 2)]
    )
    for count, context in batches:
        ops = machine.ops(config, dtype, with_graphs=False)
        blocks = context // BLOCK + 1
        pool = ops.new_pool(count * blocks, BLOCK)
        order = np.random.default_rng(0).permutation(count * blocks).reshape(count, -1)
        chunks = [Chunk([1], context - 1, table.tolist(), True) for table in order]
        batch = BatchBuilder(1, BLOCK).build(chunks)
        heads = config.num_heads + 2 * config.num_kv_heads
        qkv = torch.randn((count, heads, config.head_dim), device=machine.device).to(dtype)
        num_bytes = count * context * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
        rates = {}
        for keys, warps, stages in tiles:
            shapes = TileShapes.of(4, dtype.itemsize)
            ops.shapes = replace(shapes, single=TileShape(shapes.single.rows, keys, warps, stages))
            step = ops.open(batch, pool)
            elapsed_s = machine.time_s(partial(ops.attention, qkv, 0, step), 9)
            rates[f"keys {keys} warps {warps} stages {stages}"] = gb_s(num_bytes, elapsed_s)
        facts[f"{count} x {context}"] = {"mb": num_bytes >> 20, "gb_s": rates}
        del pool
        machine.free()
    return facts


def varlen_signature(machine: Machine) -> dict[str, Any]:
    """What torch's own paged attention takes in this release."""
    del machine
    from torch.nn.attention import varlen

    return {"torch": torch.__version__, "signature": str(inspect.signature(varlen.varlen_attn))}


def prefill_rate(machine: Machine) -> dict[str, Any]:
    """Time of a chunk through two layers at several prefixes: the b and c of the step model."""
    config = replace(machine.config, num_layers=2, vocab_size=64)
    dtype = machine.pick(torch.bfloat16, torch.float32)
    model = machine.model(config, dtype)
    length = machine.pick(2048, 32)
    prefixes = machine.pick((0, 8192, 32_768), (0, 64))
    pool = model.new_pool(-(-(prefixes[-1] + length) // BLOCK), BLOCK)
    facts: dict[str, Any] = {"chunk": length}
    costs = []
    for prefix in prefixes:
        blocks = list(range(-(-(prefix + length) // BLOCK)))
        chunk = Chunk([at % 64 for at in range(length)], prefix, blocks, True)
        elapsed_s = machine.time_s(partial(model.forward, [chunk], pool))
        attended = length * (prefix + length / 2)
        costs.append((length, attended, elapsed_s))
        facts[f"prefix {prefix}"] = {
            "layer_ms": ms(elapsed_s / 2),
            "tokens_per_s_of_32_layers": round(length / (elapsed_s * 16)),
        }
    if len(costs) > 2:
        (_, first, first_s), *_, (_, last, last_s) = costs
        slope = (last_s - first_s) / (last - first)
        facts["c_ns_of_32_layers"] = round(slope * 16 * 1e9, 4)
        facts["b_us_of_32_layers"] = round((first_s - slope * first) / length * 16 * 1e6, 3)
    return facts


def decode_step(machine: Machine) -> dict[str, Any]:
    """A whole decode step, launch by launch and as a graph."""
    dtype = machine.pick(torch.bfloat16, torch.float32)
    facts: dict[str, Any] = {}
    context = machine.pick(2048, 64)
    counts = machine.pick((1, 8, 64), (2,))
    model = machine.model(machine.config, dtype)
    pool = model.new_pool(counts[-1] * (context // BLOCK + 1), BLOCK)
    graphs, pool.graphs = pool.graphs, None
    for count in counts:
        blocks = context // BLOCK + 1
        chunks = [
            Chunk([at], context, list(range(at * blocks, (at + 1) * blocks)), True)
            for at in range(count)
        ]
        pool.graphs = None
        eager, _ = model.forward(chunks, pool)
        eager = eager.clone()
        eager_s = machine.time_s(partial(model.forward, chunks, pool))
        pool.graphs = graphs
        replayed, _ = model.forward(chunks, pool)
        replayed, _ = model.forward(chunks, pool)
        facts[f"{count} rows"] = {
            "launched_ms": ms(eager_s),
            "replayed_ms": ms(machine.time_s(partial(model.forward, chunks, pool))),
            "same_tokens": torch.equal(eager.argmax(-1), replayed.argmax(-1)),
            "max_difference": float((eager.float() - replayed.float()).abs().max()),
        }
    return facts
