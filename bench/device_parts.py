"""What the stages of ``device_check.py`` share: the machine, sizes, a clock, random models."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from runner.arch import ModelConfig
from runner.model import Model, ModelWeights
from runner.quantised import WeightReader

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 16

# Llama 3.1 8B; the vocabulary only where logits are wanted.
LARGE = ModelConfig(
    architecture="llama",
    vocab_size=128_256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=14_336,
    context_tokens=65_536,
    norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    has_qk_norm=False,
    eos_token_ids=(1,),
)
# The same proportions where the interpreter must finish.
SMALL = replace(
    LARGE,
    vocab_size=64,
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=1,
    head_dim=16,
    ffn_size=128,
    context_tokens=2048,
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the stages run.

    Attributes:
        device: The GPU, or the CPU in a dry run.
        is_dry: Small sizes, whose times mean nothing.
    """

    device: torch.device
    is_dry: bool

    @property
    def config(self) -> ModelConfig:
        """Sizes of the model."""
        return SMALL if self.is_dry else LARGE

    def pick(self, real: Any, dry: Any) -> Any:
        """Return the one of two sizes that is meant."""
        return dry if self.is_dry else real

    def streams(self) -> Any:
        """Return the device's streams."""
        from runner.ops.cuda.streams import CudaStreams, HostStreams

        return HostStreams() if self.is_dry else CudaStreams(self.device)

    def ops(self, config: ModelConfig, dtype: torch.dtype, *, with_graphs: bool = True) -> Any:
        """Return the GPU's ops; a dry run has no graphs."""
        from runner.ops.cuda.graphs import CudaRecorder
        from runner.ops.cuda.ops import CudaOps

        recorder = CudaRecorder() if with_graphs and not self.is_dry else None
        return CudaOps(config, dtype, self.device, self.streams(), recorder)

    def model(self, config: ModelConfig, dtype: torch.dtype, *, with_graphs: bool = True) -> Model:
        """Return a model of random weights, seeded, made where it computes."""
        generator = torch.Generator(self.device).manual_seed(0)
        shapes = _shapes(config)

        def read(name: str) -> torch.Tensor:
            shape = shapes[name]
            if len(shape) == 1:
                return torch.ones(shape, device=self.device)
            scale = shape[-1] ** -0.5
            return torch.randn(shape, device=self.device, generator=generator) * scale

        ops = self.ops(config, dtype, with_graphs=with_graphs)
        mode = "float32" if dtype == torch.float32 else "bfloat16"
        reader = WeightReader(mode, read, lambda _name: None)
        weights = ModelWeights.read(config, reader, ops)
        return Model(config, weights, ops, fingerprint="random", kernel_family="check")

    def wait(self) -> None:
        """Wait until the device has nothing to do."""
        if not self.is_dry:
            torch.cuda.synchronize(self.device)

    def time_s(self, call: Callable[[], object], repeats: int = 5) -> float:
        """Return the median seconds of a call, the device's work included, after one for warmth."""
        times_s = []
        for _ in range(1 + self.pick(repeats, 1)):
            self.wait()
            begun_s = time.perf_counter()
            call()
            self.wait()
            times_s.append(time.perf_counter() - begun_s)
        return statistics.median(times_s[1:])

    def free(self) -> None:
        """Give memory that nobody holds back to the device."""
        if not self.is_dry:
            torch.cuda.empty_cache()


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    from runner.arch import tensor_shapes

    return dict(tensor_shapes(config))


def gb_s(num_bytes: float, elapsed_s: float) -> float:
    """Return a rate, rounded for people."""
    return round(num_bytes / elapsed_s / 1e9, 2)


def ms(elapsed_s: float) -> float:
    """Return milliseconds, rounded for people."""
    return round(elapsed_s * 1e3, 3)
