"""The operator's page: what a gateway knows at this moment, as one page and the data it shows."""

from gateway.console.endpoints import Console

__all__ = ["Console"]
