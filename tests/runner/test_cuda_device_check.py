"""The GPU check's dry run, as far as it is cheap: every stage a line, whatever happens in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.device_check import OutOfTimeError, run_stage, stages
from bench.device_parts import Machine

REPOSITORY = Path(__file__).resolve().parents[2]
CHEAP = ["varlen_attn", "batch_copies", "decode_rate", "copies", "direct_io"]
DRY = Machine(torch.device("cpu"), is_dry=True)


def check(*flags: str) -> tuple[int, list[dict[str, Any]]]:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.device_check", *flags],
        cwd=REPOSITORY,
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (it comes with the dev extra)"
)
def test_cheap_stages_of_a_dry_run_are_well() -> None:
    code, lines = check("--dry-run", *(flag for name in CHEAP for flag in ("--only", name)))

    assert [line["stage"] for line in lines] == [name for name in stages() if name in CHEAP]
    assert [line.get("reason") for line in lines] == [None] * len(CHEAP)
    assert code == 0


def test_without_a_gpu_the_check_says_so_in_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, lines = check()
    assert code == 1
    assert [line["ok"] for line in lines] == [False]
    assert "CUDA" in lines[0]["reason"] or "GPU" in lines[0]["reason"]


def fail(machine: Machine) -> dict[str, Any]:
    raise ValueError("no such thing")


def last_too_long(machine: Machine) -> dict[str, Any]:
    raise OutOfTimeError


def test_a_stage_that_fails_is_a_line_with_its_reason() -> None:
    line = run_stage("some", fail, DRY)
    assert (line["ok"], line["reason"]) == (False, "ValueError: no such thing")
    line = run_stage("some", last_too_long, DRY)
    assert not line["ok"]
    assert "interrupted after 460 s" in line["reason"]
