"""The operator's endpoints: ``/metrics`` and ``/admin/v1``."""

from gateway.admin.endpoints import Admin

__all__ = ["Admin"]
