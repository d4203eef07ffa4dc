"""The compiled kernels as Python functions; their C++ sources document what each computes."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import torch

from runner.ops.native.build import BuildError, build

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}

# Parameter types of the functions that exist for both types, without their suffix.
_BY_TYPE: Mapping[str, Sequence[Any]] = {
    "wl_rms_norm": [*[c_void_p] * 2, c_float, c_void_p, *[c_int64] * 2, c_int],
    "wl_silu_mul": [*[c_void_p] * 2, *[c_int64] * 2, c_int],
    "wl_rope_write": [*[c_void_p] * 4, c_float, *[c_void_p] * 2, *[c_int64] * 4, c_int],
    "wl_decode": [*[c_void_p] * 4, c_int64, c_void_p, *[c_int64] * 8, c_int],
}

_TILED: Mapping[str, Sequence[Any]] = {
    "wl_pack": [c_int64, *[c_void_p] * 3, *[c_int64] * 2, *[c_void_p] * 2],
    "wl_linear": [*[c_void_p] * 2, c_int64, *[c_void_p] * 2, c_int],
    "wl_flash": [*[c_void_p] * 2, c_int64, *[c_void_p] * 3],
}


class Kernels:
    """The functions for one type of activations.

    They take addresses and check nothing: callers hand over contiguous tensors of the right sizes.
    Python's lock is free while one runs.

    Attributes:
        has_tiles: Whether this machine and type have the tile (AMX) functions.
    """

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        """Load the library at ``path``; OSError if it cannot be."""
        library = ctypes.CDLL(str(path))
        suffix = _SUFFIXES[dtype]
        self.rms_norm = _function(library, "wl_rms_norm", suffix)
        self.silu_mul = _function(library, "wl_silu_mul", suffix)
        self.rope_write = _function(library, "wl_rope_write", suffix)
        self.decode = _function(library, "wl_decode", suffix)
        self.has_tiles = dtype == torch.bfloat16 and bool(library.wl_amx())
        if self.has_tiles:
            self.pack = _tiled(library, "wl_pack")
            self.linear = _tiled(library, "wl_linear")
            self.flash = _tiled(library, "wl_flash")


class TileWeights(ctypes.Structure):
    """``Weights`` of linear.cpp."""

    _fields_ = (
        ("kind", c_int64),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("tiles", c_void_p),
        ("scales", c_void_p),
        ("groups", c_void_p),
        ("bias", c_void_p),
    )


class FlashSizes(ctypes.Structure):
    """``Sizes`` of flash.cpp."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            "num_heads",
            "num_kv",
            "dim",
            "block_size",
            "layer",
            "num_layers",
            "window",
            "threads",
        )
    )


def load_kernels(
    folder: Path, dtype: torch.dtype, environ: Mapping[str, str]
) -> Kernels | BuildError:
    """Return the kernels, compiled into ``folder`` if need be, or why there are none."""
    try:
        return Kernels(build(folder, environ), dtype)
    except BuildError as error:
        return error
    except (OSError, AttributeError) as error:
        return BuildError(f"the compiled kernels cannot be loaded: {error}")


def _function(library: ctypes.CDLL, name: str, suffix: str) -> Any:
    function = getattr(library, f"{name}_{suffix}")
    function.argtypes, function.restype = _BY_TYPE[name], None
    return function


def _tiled(library: ctypes.CDLL, name: str) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = _TILED[name], None
    return function
