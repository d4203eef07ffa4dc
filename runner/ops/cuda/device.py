"""Whether this machine has a GPU that the kernels run on, and its memory. Triton is not needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from runner.arch import ModelConfig
    from runner.ops.cuda.ops import CudaOps

# The first with bfloat16 tensor cores (Ampere).
MIN_CAPABILITY = (8, 0)

# Of what is free once the weights are there: steps need some for activations, graphs and cuBLAS.
POOL_MEMORY_RATIO = 0.85


class DeviceError(RuntimeError):
    """There is no usable GPU; the message says in one line what is missing."""


def refusal() -> str | None:
    """Return why this machine cannot compute on a GPU; None if it can."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {capability[0]}.{capability[1]}, 8.0 is needed"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error}); it comes with CUDA builds of torch"
    return None


def open_gpu(config: ModelConfig, dtype: torch.dtype, attention: str = "triton") -> CudaOps:
    """Return what computes a model on this machine's GPU, the current one of torch.

    Args:
        config: The model's sizes.
        dtype: Type of activations and KV.
        attention: ``triton`` or ``flashinfer``.

    Raises:
        DeviceError: If there is no usable one, or FlashInfer is not there.
    """
    if reason := refusal():
        raise DeviceError(f"--device cuda: {reason}")
    from runner.ops.cuda.graphs import CudaRecorder
    from runner.ops.cuda.ops import CudaOps
    from runner.ops.cuda.streams import CudaStreams

    # Sums of a long product are kept in float32 to the end, as on the CPU.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    device = torch.device("cuda", torch.cuda.current_device())
    streams = CudaStreams(device)
    if attention == "triton":
        return CudaOps(config, dtype, device, streams, CudaRecorder())
    from runner.ops.cuda.flashinfer import FlashInferAttention

    try:
        plug = FlashInferAttention(config, dtype, device)
    except ImportError as error:
        raise DeviceError(f"--attention flashinfer: it cannot be imported ({error})") from error
    return CudaOps(config, dtype, device, streams, None, plug)


def pool_memory_bytes() -> int:
    """Return what a KV pool may take of the GPU; once the weights are there."""
    free, _ = torch.cuda.mem_get_info()
    return int(free * POOL_MEMORY_RATIO)
