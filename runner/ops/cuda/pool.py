"""The KV pool on a GPU: the same bytes as on any tier, and the order of whoever touches them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runner.kvpool import KvPool
from runner.ops.cuda.streams import PoolOrder
from runner.tiers.cuda_mover import CudaBlockMover

if TYPE_CHECKING:
    from runner.arch import ModelConfig
    from runner.ops.cuda.graphs import DecodeGraphs
    from runner.ops.cuda.streams import StreamApi

# The kernels count token places in 32 bits.
MAX_PLACES = 2**31


class CudaKvPool(KvPool):
    """See ``KvPool``; blocks are copied on streams of their own.

    Attributes:
        order: Who waits for whom.
        graphs: Recorded decode steps, bound to this memory; None where none are recorded.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        api: StreamApi,
        graphs: DecodeGraphs | None,
    ) -> None:
        """Take the device's memory.

        Raises:
            ValueError: If there are more tokens than the kernels can count, or it does not fit.
        """
        places = num_blocks * block_size * config.num_layers * 2
        if places >= MAX_PLACES:
            most = MAX_PLACES // (config.num_layers * 2)
            raise ValueError(f"pool of {num_blocks * block_size} tokens: must be below {most}")
        try:
            super().__init__(
                num_blocks,
                block_size,
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=dtype,
                device=device,
            )
        except torch.OutOfMemoryError as error:
            tokens = num_blocks * block_size
            raise ValueError(f"pool of {tokens} tokens: the GPU's memory is too small") from error
        self.order = PoolOrder(api)
        self.graphs = graphs
        self._api = api

    def copy_block(self, source: int, target: int) -> None:
        """See ``KvPool``; waits for loads that have been announced, all layers at once."""
        self.order.before_step()
        super().copy_block(source, target)

    def wait(self) -> float:
        """See ``KvPool``."""
        return self.order.wait_for_step()

    def new_mover(self) -> CudaBlockMover:
        """See ``KvPool``."""
        return CudaBlockMover(self, self.order, self._api)
