"""Fixtures for all tests: the real weights, fetched once, and one runner that serves them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

# Triton interprets on the CPU; 0 on a machine with a GPU. Before any other import: transformers
# imports triton, and whoever imports it first decides.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import HealthCheck, settings

from runner.config import PoolSize, RunnerConfig
from runner.fetch import fetch
from tests.live_runner import LiveRunner

if TYPE_CHECKING:
    from collections.abc import Iterator

# How long an example takes, or takes to make, says more about the machine than about the code. All
# else stays as hypothesis has it, in CI the same examples in every run.
settings.register_profile("warmlane", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("warmlane")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Folder with the SmolLM2 weights and tokenizer; downloaded if they are not there yet.

    ``WARMLANE_MODELS_DIR`` names another place than the repository's ``models``.
    """
    return fetch(Path(os.environ.get("WARMLANE_MODELS_DIR") or REPOSITORY / "models"))


@pytest.fixture(scope="session")
def live_runner(smollm2_dir: Path) -> Iterator[LiveRunner]:
    """One runner for the whole session: 2,048 tokens of KV, events on random ports.

    Tests that share it must not depend on an empty cache; ``POST /reset_prefix_cache`` makes one.
    """
    config = RunnerConfig(
        model=str(smollm2_dir),
        port=0,
        pool=PoolSize(tokens=2_048),
        kv_events="tcp://127.0.0.1:0",
        kv_replay="tcp://127.0.0.1:0",
    )
    with LiveRunner.start(config) as live:
        yield live
