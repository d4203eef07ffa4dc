"""``Ops`` on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.ops.cuda.attention import PagedAttention, PartBuffers
from runner.ops.cuda.graphs import SIZES, DecodeGraphs
from runner.ops.cuda.layout import SPLIT_TOKENS, TileShapes, aligned, lay_out
from runner.ops.cuda.pool import CudaKvPool
from runner.ops.cuda.ring import UploadRing
from runner.ops.cuda.rows import CudaLinear, CudaNorm, RopeWriter, silu_mul
from runner.quantised import Int4Weight, Int8Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from runner.arch import ModelConfig
    from runner.batch import Batch
    from runner.kvpool import KvPool
    from runner.ops.cuda.attention import Attention
    from runner.ops.cuda.graphs import Recorder
    from runner.ops.cuda.layout import Layout
    from runner.ops.cuda.streams import StreamApi
    from runner.ops.interface import Linear, Norm
    from runner.quantised import Weight

# Slots for split contexts that graphs can use: 4M tokens of context in one step, 135 MB for 32
# heads of 128.
MAX_SLOTS = 8192


@dataclass(slots=True)
class CudaStep:
    """See ``Step``; with what the kernels read.

    Attributes:
        layout: What was packed.
        values: The same on the device.
        pool: Where KV goes.
        parts: Memory for split contexts.
        graph_rows: Rows of the graph that stands for this step; 0 for none.
        num_samples: Rows that sample, without padding.
        adapter_rows: See ``Step``.
        adapter_samples: See ``Step``.
    """

    layout: Layout
    values: torch.Tensor
    pool: CudaKvPool
    parts: tuple[torch.Tensor, torch.Tensor]
    graph_rows: int
    num_samples: int
    adapter_rows: Mapping[str, torch.Tensor]
    adapter_samples: Mapping[str, torch.Tensor]

    @property
    def token_ids(self) -> torch.Tensor:
        """See ``Step``."""
        return self._part(0)

    @property
    def positions(self) -> torch.Tensor:
        """Shape: [rows]."""
        return self._part(1)

    @property
    def token_rows(self) -> torch.Tensor:
        """Where each row's keys of layer 0 go, in token places of the pool; -1 for nowhere."""
        return self._part(2)

    @property
    def sample_rows(self) -> torch.Tensor:
        """See ``Step``."""
        at = 3 * aligned(self.layout.num_rows)
        return self.values[at : at + self.layout.num_samples]

    @property
    def tiles(self) -> torch.Tensor:
        """The descriptors."""
        return self.values[self.layout.tiles_at :]

    @property
    def tables(self) -> torch.Tensor:
        """The block tables."""
        return self.values[self.layout.tables_at :]

    def _part(self, index: int) -> torch.Tensor:
        at = index * aligned(self.layout.num_rows)
        return self.values[at : at + self.layout.num_rows]


class CudaOps:
    """See ``Ops``.

    Attributes:
        shapes: How attention is cut into tiles; a benchmark may try others between steps.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        api: StreamApi,
        recorder: Recorder | None,
        attention: Attention | None = None,
    ) -> None:
        """Prepare for models of these sizes.

        Args:
            config: The sizes.
            dtype: float32 or bfloat16.
            device: Where to compute; the CPU in Triton's interpreter.
            api: Its streams.
            recorder: Records decode steps; None runs them launch by launch.
            attention: Computes attention; None for the Triton kernels.
        """
        self.dtype = dtype
        self.device = device
        self._config = config
        self._api = api
        self._recorder = recorder
        self._group = config.num_heads // config.num_kv_heads
        self.shapes = TileShapes.of(self._group, dtype.itemsize)
        self._attention: Attention = attention or PagedAttention(config)
        self.family = self._attention.family
        self._rope = RopeWriter(config, device)
        self._ring = UploadRing(api, device)
        most_splits = -(-config.context_tokens // SPLIT_TOKENS)
        self._most_splits = most_splits
        self._parts = PartBuffers(min(MAX_SLOTS, SIZES[-1] * most_splits), config, device)

    def new_pool(self, num_blocks: int, block_size: int) -> CudaKvPool:
        """See ``Ops``."""
        graphs = None if self._recorder is None else DecodeGraphs(self._recorder, self.device)
        return CudaKvPool(
            num_blocks, block_size, self._config, self.dtype, self.device, self._api, graphs
        )

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        """See ``Ops``.

        Raises:
            ValueError: If the weight is a quantised one.
        """
        if isinstance(weight, Int8Weight | Int4Weight):
            raise ValueError("a GPU computes in float32 or bfloat16")
        return CudaLinear(self._placed(weight), None if bias is None else self._placed(bias))

    def norm(self, scale: torch.Tensor) -> Norm:
        """See ``Ops``."""
        return CudaNorm(self._placed(scale), self._config.norm_eps)

    def head_norm(self, scale: torch.Tensor) -> torch.Tensor:
        """See ``Ops``."""
        return self._placed(scale)

    def open(self, batch: Batch, pool: KvPool) -> CudaStep:
        """See ``Ops``."""
        if not isinstance(pool, CudaKvPool):
            raise TypeError("the pool is another implementation's")
        layout, target = self._lay_out(batch, pool)
        self._attention.begin(batch, pool.block_size)
        return CudaStep(
            layout=layout,
            values=self._ring.upload(layout.values, target),
            pool=pool,
            parts=self._parts.take(layout.num_slots),
            graph_rows=layout.num_rows if target is not None else 0,
            num_samples=len(batch.order),
            adapter_rows=self._placed_rows(batch.adapter_rows),
            adapter_samples=self._placed_rows(batch.adapter_samples),
        )

    def _lay_out(self, batch: Batch, pool: CudaKvPool) -> tuple[Layout, torch.Tensor | None]:
        """Pack a step; returns the place of its integers too if a graph stands for it."""
        size = pool.graphs.size_of(batch) if pool.graphs is not None else 0
        if size and pool.graphs is not None:
            layout = lay_out(batch, self._group, self.shapes, size, self._most_splits)
            target = pool.graphs.buffer(size, len(layout.values))
            if target is not None and layout.num_slots <= self._parts.num_slots:
                return layout, target
        return lay_out(batch, self._group, self.shapes), None

    def run(self, step: CudaStep, compute: Callable[[CudaStep], torch.Tensor]) -> torch.Tensor:
        """See ``Ops``."""
        order, graphs = step.pool.order, step.pool.graphs
        if step.graph_rows and graphs is not None:
            order.before_step()
            result = graphs.run(step.graph_rows, lambda: compute(step))[: step.num_samples]
        else:
            result = compute(step)
        order.after_step()
        return result

    def rope_write(
        self, qkv: torch.Tensor, layer: int, head_norm: torch.Tensor | None, step: CudaStep
    ) -> None:
        """See ``Ops``."""
        # Before anything of this layer touches the pool. A step that only reads what has come
        # needs it for reading; one that was given a block whose load nobody wants any more must
        # not have its keys overwritten by what is still on its way into that block.
        step.pool.order.before_layer(layer)
        self._rope(qkv, layer, head_norm, step)

    def attention(self, qkv: torch.Tensor, layer: int, step: CudaStep) -> torch.Tensor:
        """See ``Ops``."""
        return self._attention(qkv, layer, step)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See ``Ops``."""
        return silu_mul(gate_up)

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self.device, dtype=self.dtype).contiguous()

    def _placed_rows(self, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: at.to(self.device) for name, at in rows.items()}
