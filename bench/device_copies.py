"""Stages of ``device_check.py`` about moving bytes: copies, restores under a step, the disk."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.device_parts import BLOCK, Machine, gb_s, ms
from runner.batch import Chunk

if TYPE_CHECKING:
    from runner.model import Model

KIB, MIB = 2**10, 2**20


def copies(machine: Machine) -> dict[str, Any]:
    """Rates between pinned memory and the device by the size of a piece, and what asking costs."""
    total = machine.pick(512 * MIB, MIB)
    host = machine.streams().pinned(total)
    place = torch.zeros(total, dtype=torch.uint8, device=machine.device)
    facts: dict[str, Any] = {}
    for size in machine.pick([64 * KIB << (2 * at) for at in range(5)] + [32 * MIB], [64 * KIB]):
        pairs = [(host[at : at + size], place[at : at + size]) for at in range(0, total, size)]
        facts[f"{size // KIB} KiB"] = {
            "h2d": _copy(machine, [(there, here) for here, there in pairs]),
            "d2h": _copy(machine, pairs),
        }
    return facts


def _copy(machine: Machine, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    """Copy each pair's second into its first."""
    submit_s = 0.0

    def run() -> None:
        nonlocal submit_s
        begun_s = time.perf_counter()
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
        submit_s = time.perf_counter() - begun_s

    elapsed_s = machine.time_s(run, 3)
    num_bytes = sum(target.numel() for target, _ in pairs)
    return {
        "gb_s": gb_s(num_bytes, elapsed_s),
        "submit_us_per_piece": round(submit_s / len(pairs) * 1e6, 2),
    }


def batch_copies(machine: Machine) -> dict[str, Any]:
    """Whether one call can submit many copies (``cuMemcpyBatchAsync``)."""
    del machine
    facts: dict[str, Any] = {"cuda.bindings": importlib.util.find_spec("cuda") is not None}
    if facts["cuda.bindings"]:
        from cuda.bindings import driver

        facts["in_bindings"] = hasattr(driver, "cuMemcpyBatchAsync")
    try:
        facts["in_driver"] = hasattr(ctypes.CDLL("libcuda.so.1"), "cuMemcpyBatchAsync")
    except OSError as error:
        facts["in_driver"] = f"no driver: {error}"
    return facts


def restore(machine: Machine) -> dict[str, Any]:
    """A prefix restored from pinned memory, then a tail computed: one after the other, by groups.

    ``free`` computes while the prefix is copied without waiting for any of it: the bound.
    """
    dtype = machine.pick(torch.bfloat16, torch.float32)
    model = machine.model(machine.config, dtype)
    facts: dict[str, Any] = {}
    for prefix, tail in machine.pick(((2048, 64), (8192, 64), (8192, 1024)), ((64, 8),)):
        facts[f"{prefix} + {tail}"] = _restore(machine, model, prefix, tail)
        machine.free()
    return facts


def _restore(machine: Machine, model: Model, prefix: int, tail: int) -> dict[str, Any]:
    count = prefix // BLOCK
    blocks = list(range(count + -(-tail // BLOCK)))
    pool: Any = model.new_pool(len(blocks), BLOCK)
    tokens = [at * 31 % model.config.vocab_size for at in range(prefix + tail)]
    step = machine.pick(2048, 32)
    starts = range(0, prefix, step)
    compute_s = machine.time_s(
        lambda: [
            model.forward([Chunk(tokens[at : min(at + step, prefix)], at, blocks, False)], pool)
            for at in starts
        ],
        1,
    )
    mover = pool.new_mover()
    kept = machine.streams().pinned(count * mover.block_bytes)
    size = mover.block_bytes
    views = [memoryview(kept.numpy())[at * size : (at + 1) * size] for at in range(count)]
    for block in range(count):
        mover.copy_out(block, views[block])
    chunk = Chunk(tokens[prefix:], prefix, blocks, True)
    expected = model.forward([chunk], pool)[0].clone()
    wanted = pool.data[:count].clone()

    def serial() -> torch.Tensor:
        pool.order.wait_for(mover.begin_in(views, blocks[:count]))
        return model.forward([chunk], pool)[0]

    def grouped() -> torch.Tensor:
        pool.order.announce(mover.begin_in(views, blocks[:count]))
        return model.forward([chunk], pool)[0]

    def free() -> torch.Tensor:
        mover.begin_in(views, blocks[:count])
        return model.forward([chunk], pool)[0]

    def single() -> torch.Tensor:
        for block, view in enumerate(views):
            mover.copy_in(view, block)
        return model.forward([chunk], pool)[0]

    facts: dict[str, Any] = {"mb": count * size >> 20, "recompute_ms": ms(compute_s)}
    for way in (single, serial, grouped):
        pool.data[:count].zero_()
        machine.wait()
        logits = way().clone()
        machine.wait()
        same = torch.equal(logits, expected) and torch.equal(pool.data[:count], wanted)
        facts[way.__name__] = {"ms": ms(machine.time_s(way)), "same_bits": same}
    facts["free"] = {"ms": ms(machine.time_s(free))}
    facts["tail_alone_ms"] = ms(machine.time_s(lambda: model.forward([chunk], pool)))
    if not all(facts[name]["same_bits"] for name in ("single", "serial", "grouped")):
        raise AssertionError(f"restored bits differ: {facts}")
    return facts


def direct_io(machine: Machine) -> dict[str, Any]:
    """Reads past the page cache by 1, 4 and 16 threads, 2 MiB at a time."""
    size = 2 * MIB
    count = machine.pick(512, 4)
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("DEVICE_CHECK_DIR")) as folder:
        path = Path(folder) / "blocks"
        memory = mmap.mmap(-1, size)
        memory[:] = os.urandom(size)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            begun_s = time.perf_counter()
            for at in range(count):
                os.pwrite(handle, memory, at * size)
            os.fsync(handle)
            facts["write_gb_s"] = gb_s(count * size, time.perf_counter() - begun_s)
            for threads in (1, 4, 16):
                facts[f"read_{threads}_gb_s"] = _read(handle, count, size, threads)
        finally:
            os.close(handle)
    return facts


def _read(handle: int, count: int, size: int, threads: int) -> float:
    def work(first: int) -> None:
        with mmap.mmap(-1, size) as buffer:
            for at in range(first, count, threads):
                if os.preadv(handle, [buffer], at * size) != size:
                    raise OSError("a short read")

    begun_s = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return gb_s(count * size, time.perf_counter() - begun_s)
