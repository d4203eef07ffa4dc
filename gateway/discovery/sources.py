"""The source that a pool's ``discovery`` asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.config.discovery import DnsDiscovery, FileDiscovery, KubernetesDiscovery
from gateway.discovery.from_dns import DnsSource
from gateway.discovery.from_file import FileSource
from gateway.discovery.from_kubernetes import KubernetesSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.config.discovery import DiscoveryConfig
    from gateway.discovery.listing import Source


def make_source(config: DiscoveryConfig, is_well: Callable[[str], bool]) -> Source:
    """Make a source.

    Args:
        config: What is configured.
        is_well: Says of a worker's id whether the worker answers.

    Raises:
        ValueError: If there is nothing to look for.
    """
    if isinstance(config, FileDiscovery):
        return FileSource(config)
    if isinstance(config, DnsDiscovery):
        return DnsSource(config, is_well=is_well)
    if isinstance(config, KubernetesDiscovery):
        return KubernetesSource(config)
    raise ValueError("static workers are not looked for")
