"""Glue between the fleet and ``prefix_index.replica``; no request waits for anything here."""

from gateway.fleet.sharing.metrics import SharingCollector
from gateway.fleet.sharing.sharing import Sharing

__all__ = ["Sharing", "SharingCollector"]
