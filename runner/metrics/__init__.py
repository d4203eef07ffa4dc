"""Prometheus text of one runner; ``recorder`` says which names there are."""

from runner.metrics.recorder import RunnerMetrics
from runner.metrics.transfers import TransferMeter
from runner.metrics.window import WINDOW_S

__all__ = ["WINDOW_S", "RunnerMetrics", "TransferMeter"]
