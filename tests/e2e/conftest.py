"""One fleet of real processes for all end-to-end tests: loading weights takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet, running_fleet


@pytest.fixture(scope="session")
def fleet(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), smollm2_dir) as fleet:
        yield fleet
