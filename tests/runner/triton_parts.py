"""What tests of the GPU's path share: Triton's interpreter here, the GPU where there is one."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

from runner.arch import ModelConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if DEVICE.type == "cpu":
    if "triton" in sys.modules and not os.environ.get("TRITON_INTERPRET"):
        # Its own library is then compiled code, which the interpreter cannot run.
        pytest.skip(
            "triton was imported before TRITON_INTERPRET=1 was set", allow_module_level=True
        )
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="triton is not installed (it comes with the dev extra)")


def gpu_ops(config: ModelConfig, dtype: torch.dtype = torch.float32, recorder: Any = None) -> Any:
    """Return the GPU's ops: on it, or on the CPU in the interpreter."""
    from runner.ops.cuda.ops import CudaOps
    from runner.ops.cuda.streams import CudaStreams, HostStreams

    api: Any = CudaStreams(DEVICE) if DEVICE.type == "cuda" else HostStreams()
    return CudaOps(config, dtype, DEVICE, api, recorder)
