"""The operator's endpoints: ``/metrics`` and ``/admin/v1``."""

from gateway.admin.endpoints import METRICS_CONTENT_TYPE, Admin

__all__ = ["METRICS_CONTENT_TYPE", "Admin"]
