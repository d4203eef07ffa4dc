"""The kernels compile to machine code of a Hopper GPU, which needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# Not imported here: whoever imports it first decides whether it interprets.
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (it comes with the dev extra)"
)

REPOSITORY = Path(__file__).resolve().parents[2]

# What one multiprocessor of an H100 or H200 can give one program.
SHARED_BYTES = 227 * 1024

# In a process of its own: here the interpreter has taken the compiler's place.
SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from runner.ops.cuda.attention_kernels import attend_kernel, merge_kernel
from runner.ops.cuda.layout import SPLIT_TOKENS, TileShapes
from runner.ops.cuda.row_kernels import rms_norm_kernel, rope_write_kernel, silu_mul_kernel

TARGET = GPUTarget("cuda", 90, 32)
VALUE = {"float32": "*fp32", "bfloat16": "*bf16"}[sys.argv[1]]
INTEGERS = {"tables", "tiles", "positions", "token_rows"}
FLOATS = {"parts", "stats", "cosines", "sines"}
HEADS = {"NUM_HEADS": 32, "HEAD_DIM": 128, "DIM": 128, "SPLIT": SPLIT_TOKENS}


def type_of(name):
    if name in INTEGERS:
        return "*i32"
    if name in FLOATS:
        return "*fp32"
    if name in ("epsilon", "scale_log2"):
        return "fp32"
    return "i32" if name == "layer" or name.endswith("stride") else VALUE


def build(kernel, constants, **options):
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else type_of(name) for name in names}
    whole = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if types[name].startswith("*") or name.endswith("stride")
    }
    source = ASTSource(kernel, types, constexprs=whole, attrs=aligned)
    built = triton.compile(source, target=TARGET, options=options | {"enable_fp_fusion": True})
    assert built.asm["cubin"]
    print(kernel.__name__, built.metadata.shared)


shapes = TileShapes.of(4, 2 if VALUE == "*bf16" else 4)
for shape, is_split in ((shapes.single, True), (shapes.short, True), (shapes.long, False)):
    tile = {"TILE_ROWS": shape.rows, "TILE_KEYS": shape.keys, "IS_SPLIT": is_split}
    build(
        attend_kernel,
        HEADS | tile | {"GROUP": 4, "BLOCK_SIZE": 16, "WINDOW": 0},
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
build(merge_kernel, HEADS, num_warps=1)
build(rms_norm_kernel, {"WIDTH": 4096, "TILE": 4096})
sizes = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64, "TILE": 64, "TILE_HEADS": 8}
build(rope_write_kernel, sizes | {"BLOCK_SIZE": 16, "HAS_NORM": True})
build(silu_mul_kernel, {"WIDTH": 14336, "TILE": 512})
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernels_of_an_8b_model_compile_and_fit(dtype: str, tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    built = subprocess.run(
        [sys.executable, "-c", SCRIPT, dtype],
        cwd=REPOSITORY,
        # Nothing built before may stand for what is here now.
        env=environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-2000:]
    lines = [line.split() for line in built.stdout.splitlines()]
    assert len(lines) == 7
    assert all(int(shared) <= SHARED_BYTES for _, shared in lines)
