"""The connection tests run on both event loops: their transports differ in how they end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pytest

ON_BOTH_LOOPS = frozenset(("test_upstream", "test_faults"))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Choose the loops of a test by its file."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]]
    factories = {"asyncio": asyncio.new_event_loop}
    if item.path.stem in ON_BOTH_LOOPS:
        factories["uvloop"] = uvloop.new_event_loop
    return factories
