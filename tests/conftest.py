"""Fixtures for all tests: the real weights, fetched once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.fetch import fetch

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Folder with the SmolLM2 weights and tokenizer; downloaded if they are not there yet.

    ``WARMLANE_MODELS_DIR`` names another place than the repository's ``models``.
    """
    return fetch(Path(os.environ.get("WARMLANE_MODELS_DIR") or REPOSITORY / "models"))
