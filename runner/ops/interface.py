"""What an implementation of the decoder's arithmetic provides.

A layer is: norm, qkv linear, ``rope_write``, ``attention``, output linear with the residual, norm,
gate and up linear, ``silu_mul``, down linear with the residual. After the last layer the rows that
sample are normalised and go through the head, a linear like the others.

Life of the objects: at load, ``linear`` and ``norm`` turn weights into callables that hold them in
the form (and on the device) the implementation computes with. Per step, ``open`` moves the batch's
index tensors where they are needed and prepares what all layers share (angles, masks, tables). All
calls come from the engine thread, inside ``torch.inference_mode``.

An implementation may compute asynchronously (streams): results are tensors of its device, and the
pool's bytes count as written once whoever reads them has waited for the step. It must follow the
step's order: a layer's ``rope_write`` comes before its ``attention``, which reads what it wrote.

Two properties callers rely on:

- Equal bytes in the pool and equal chunk boundaries give equal bits.
- ``family`` names everything that decides a KV block's bits: weights, kernels, and whether a row's
  bits depend on what shares the batch (``-varying``). It is part of the KV namespace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from runner.batch import Batch
    from runner.kvpool import KvPool
    from runner.quantised import Weight


class Linear(Protocol):
    """A linear layer, its bias included."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows @ weight.T + bias as a fresh tensor. Shapes: [rows, in] -> [rows, out]."""

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return residual + rows @ weight.T + bias as a fresh tensor."""


class Norm(Protocol):
    """Root mean square norm with its learned scale."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Shapes: [rows, hidden] -> [rows, hidden]."""


class Step(Protocol):
    """One step's index tensors, on the implementation's device; see ``Batch`` for what they are."""

    @property
    def token_ids(self) -> torch.Tensor:
        """Shape: [rows]."""

    @property
    def sample_rows(self) -> torch.Tensor:
        """Shape: [samples]."""

    @property
    def adapter_rows(self) -> Mapping[str, torch.Tensor]:
        """Rows of each adapter in use."""

    @property
    def adapter_samples(self) -> Mapping[str, torch.Tensor]:
        """The same among the rows that sample."""


StepT = TypeVar("StepT", bound=Step)


class Ops(Protocol[StepT]):
    """The arithmetic of one model on one device.

    Attributes:
        dtype: Type of activations and KV.
        device: Where its tensors are, those of the pool too.
        family: See the module.
    """

    dtype: torch.dtype
    device: torch.device
    family: str

    def new_pool(self, num_blocks: int, block_size: int) -> KvPool:
        """Allocate a KV pool of this model's shape (a CPU's memory is taken as it is used)."""

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        """Take in a weight. Shapes: weight [out, in], bias [out], float32."""

    def norm(self, scale: torch.Tensor) -> Norm:
        """Take in a norm's scale. Shape: [hidden], float32."""

    def head_norm(self, scale: torch.Tensor) -> torch.Tensor:
        """Take in the scales of the per-head norm. Shape: [heads + kv_heads, dim], float32."""

    def open(self, batch: Batch, pool: KvPool) -> StepT:
        """Prepare a step."""

    def run(self, step: StepT, compute: Callable[[StepT], torch.Tensor]) -> torch.Tensor:
        """Compute an opened step: call ``compute``, or repeat what it launched for one like it."""

    def rope_write(
        self, qkv: torch.Tensor, layer: int, head_norm: torch.Tensor | None, step: StepT
    ) -> None:
        """Norm (if given) and rotate queries and keys in place; store keys and values in the pool.

        Shape of qkv: [rows, heads + 2 * kv_heads, dim].
        """

    def attention(self, qkv: torch.Tensor, layer: int, step: StepT) -> torch.Tensor:
        """Attend over each row's context, itself included. Shape: [rows, heads * dim]."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up. Shapes: [rows, 2 * ffn] -> [rows, ffn]."""
