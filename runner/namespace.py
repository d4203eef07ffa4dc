"""What makes KV bytes usable by another process: the facts behind every key and folder name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.model import Model

# Raise it when the bytes of a block change their meaning.
_LAYOUT_VERSION = 1


def kv_facts(model: Model, block_size: int) -> dict[str, object]:
    """Return everything that a block's bytes depend on, beside its tokens, salt and adapter.

    Two runners share KV only if all of it is equal. ``kernel_family`` names the arithmetic: the
    same weights in another precision, or computed by other kernels, give other bytes.
    """
    sizes = model.config
    return {
        "layout": _LAYOUT_VERSION,
        # Over all sizes, rope and window, and over every weight.
        "model": model.fingerprint,
        "dtype": str(model.dtype),
        "kernel_family": model.kernel_family,
        "block_size": block_size,
        "num_layers": sizes.num_layers,
        "num_kv_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
    }
