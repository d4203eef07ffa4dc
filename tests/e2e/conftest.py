"""One fleet of real processes for all end-to-end tests: loading weights takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet, make_runner


@pytest.fixture(scope="session")
def fleet(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    fleet = Fleet(folder, [make_runner(folder, f"runner-{i}", smollm2_dir) for i in range(2)])
    try:
        for runner in fleet.runners:
            runner.start()
        for runner in fleet.runners:
            runner.wait_ready()
        yield fleet
    finally:
        for process in (*fleet.gateways, *fleet.runners):
            process.stop()
