"""Which tests run on both event loops, and which on both fronts of the client port."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Transports differ in how they end.
ON_BOTH_LOOPS = frozenset(("test_upstream", "test_faults", "test_front", "test_tls"))
# What clients see may not depend on what serves them.
ON_BOTH_FRONTS = frozenset(
    (
        *("test_http", "test_faults", "test_proxy", "test_server", "test_api_openai"),
        *("test_smuggling", "test_routes_http", "test_tls", "test_limits", "test_anthropic"),
        *("test_surfaces", "test_include_usage", "test_cases_protocol", "test_cases_transport"),
        *("test_cases_security", "test_deadline", "test_resilience"),
        "test_fault_matrix",
    )
)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Choose the loops of a test by its file."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]]
    factories = {"asyncio": asyncio.new_event_loop}
    if item.path.stem in ON_BOTH_LOOPS:
        factories["uvloop"] = uvloop.new_event_loop
    return factories


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of a client's view once per front."""
    if metafunc.definition.path.stem in ON_BOTH_FRONTS:
        metafunc.parametrize("front", ["aiohttp", "raw"], indirect=True)


@pytest.fixture(autouse=True)
def front(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name the front of the gateways that this test starts, and make them have it."""
    chosen = str(getattr(request, "param", "raw"))
    monkeypatch.setattr("tests.fakes.gateway.default_front", chosen)
    return chosen
