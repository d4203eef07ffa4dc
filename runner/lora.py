"""What LoRA adapters add to a decoder's linears, for the rows of a step that asked for them.

Several adapters and the base model share a batch: the base model's linears run over all rows, then
each adapter adds its low-rank product to its own rows. Without adapters nothing is added at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from runner.adapters import AdapterFiles
    from runner.arch import ModelConfig

Site: TypeAlias = Literal["qkv", "output", "gate_up", "down"]
"""A linear of the decoder as it is computed: of one or several linears of the model, joined."""

_SITES: Mapping[Site, Sequence[str]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


# Matrices this thin cost oneDNN's bfloat16 more to set up than to compute: below this many rows a
# float32 product takes a quarter to a half of its time, at 512 rows five times (AMD, 2026-11).
_FEW_ROWS = 32


@dataclass(frozen=True, slots=True)
class LowRank:
    """Two thin matrices for one site, kept in float32 whatever the model computes in.

    Attributes:
        inner: Shape: [in, rank]; the ranks of joined linears add up.
        outer: With the adapter's scale. Shape: [rank, out].
    """

    inner: torch.Tensor
    outer: torch.Tensor

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what is added, in either type. Shapes: [rows, in] -> [rows, out]."""
        dtype = torch.float32 if len(rows) < _FEW_ROWS else rows.dtype
        inner, outer = self.inner.to(dtype), self.outer.to(dtype)
        return torch.mm(torch.mm(rows.to(dtype), inner), outer)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter.

    Attributes:
        name: What requests call it.
        folder: Where it came from.
        digest: See ``AdapterFiles``.
        layers: What it adds to each layer's sites; a site it does not touch is missing.
    """

    name: str
    folder: Path
    digest: str
    layers: Sequence[Mapping[Site, LowRank]]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a step, or those of them that sample, that run with one adapter.

    Attributes:
        adapter: Which.
        rows: Ascending.
    """

    adapter: Adapter
    rows: torch.Tensor

    def add_to(self, out: torch.Tensor, layer: int, site: Site, rows: torch.Tensor) -> None:
        """Add the adapter's part to ``out``, the site's result for the inputs ``rows``."""
        low_rank = self.adapter.layers[layer].get(site)
        if low_rank is None:
            return
        if len(self.rows) == len(rows):
            out.add_(low_rank(rows))
        else:
            added = low_rank(rows.index_select(0, self.rows))
            out.index_add_(0, self.rows, added.to(out.dtype))


def build_adapter(files: AdapterFiles, config: ModelConfig, device: torch.device) -> Adapter:
    """Load an adapter.

    Args:
        files: Checked against the model.
        config: The model's sizes.
        device: Where the model computes.
    """
    with torch.inference_mode():
        layers = [_layer(files, config, device, at) for at in range(config.num_layers)]
    return Adapter(files.name, files.folder, files.digest, layers)


def _layer(
    files: AdapterFiles, config: ModelConfig, device: torch.device, at: int
) -> dict[Site, LowRank]:
    sites: dict[Site, LowRank] = {}
    for site, linears in _SITES.items():
        if files.linears.isdisjoint(linears):
            continue
        inner, outer = _joined(files, config, at, linears)
        scaled = (outer * files.scale).t().contiguous()
        sites[site] = LowRank(inner.t().contiguous().to(device), scaled.to(device))
    return sites


def _joined(
    files: AdapterFiles, config: ModelConfig, at: int, linears: Sequence[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join the linears of a site: A below each other, B along a diagonal of blocks."""
    inners, outers = [], []
    for linear in linears:
        rows, columns = config.linear_shape(linear)
        if linear in files.linears:
            inners.append(files.read(at, linear, "A"))
            outers.append(files.read(at, linear, "B"))
        else:
            inners.append(torch.empty(0, columns))
            outers.append(torch.empty(rows, 0))
    outer: torch.Tensor = torch.block_diag(*outers)  # type: ignore[no-untyped-call]
    return torch.cat(inners), outer
