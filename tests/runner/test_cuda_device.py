"""``--device cuda``: what it says where it cannot be, and what it takes where it can."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.config import PoolSize, RunnerConfig, parse_args, pool_tokens
from runner.ops.cuda import device
from runner.serve import StartError, load
from runner.weights import load_model

REPOSITORY = Path(__file__).resolve().parents[2]


class Gpu:
    """A machine as torch describes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
        known: dict[str, Any] = {
            "built": "13.0",
            "seen": True,
            "capability": (9, 0),
            "triton": True,
        }
        facts = known | facts
        monkeypatch.setattr(torch.version, "cuda", facts["built"])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: facts["seen"])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: facts["capability"])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU X")

        def find(name: str) -> object:
            if not facts["triton"]:
                raise ModuleNotFoundError(f"No module named {name!r}")
            return object()

        monkeypatch.setattr(device.importlib, "import_module", find)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"built": None}, "built without CUDA"),
        ({"seen": False}, "no NVIDIA GPU"),
        ({"capability": (7, 5)}, "GPU X has compute capability 7.5, 8.0 is needed"),
        ({"triton": False}, "triton cannot be imported"),
    ],
)
def test_a_machine_that_lacks_something_is_refused_in_one_line(
    facts: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, smollm2_dir: Path
) -> None:
    Gpu(monkeypatch, **facts)
    config = RunnerConfig(model=str(smollm2_dir), port=0, device="cuda")
    with pytest.raises(StartError, match=said) as refused:
        load(config)
    assert str(refused.value).startswith("--device cuda: ")
    assert "\n" not in str(refused.value)


def test_a_machine_that_lacks_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch)
    assert device.refusal() is None


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_weights_are_refused_on_a_gpu(
    dtype: str, tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(device.DeviceError, match=f"float32 or bfloat16, not in {dtype}"):
        load_model(tiny_dir, dtype, 1, device="cuda")
    with pytest.raises(SystemExit):
        parse_args(["--device", "cuda", "--dtype", dtype], {})
    assert "--device cuda computes in float32 or bfloat16" in capsys.readouterr().err


def test_the_pool_takes_the_devices_memory_unless_it_is_told_otherwise() -> None:
    assert pool_tokens(None, 1000, 16, 10_000_000) == 10_000
    assert pool_tokens(PoolSize(tokens=64), 1000, 16, 10_000_000) == 64


def test_a_cpu_runner_never_imports_triton(tiny_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from runner.weights import load_model;"
        "import runner.serve, runner.engine, runner.tiers.assemble;"
        f"load_model(Path({str(tiny_dir)!r}), 'float32', 1);"
        "sys.exit('triton' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, timeout=100)
