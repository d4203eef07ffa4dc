"""The shape of the configuration, its defaults and what they mean, section by section.

The schema is closed: a key that is not here is an error. Where values come from (file, environment,
flags) and which line they stand on is ``gateway/settings.py``'s business; this room is only shape.
"""

from gateway.config.index import check_redis_url
from gateway.config.pools import KeepWarmConfig, OffloadConfig, PoolConfig, WorkerConfig
from gateway.config.root import Settings
from gateway.config.server import LimitsConfig, ServerConfig
from gateway.config.tenants import MatchConfig, RouteConfig, TenantConfig

__all__ = [
    "KeepWarmConfig",
    "LimitsConfig",
    "MatchConfig",
    "OffloadConfig",
    "PoolConfig",
    "RouteConfig",
    "ServerConfig",
    "Settings",
    "TenantConfig",
    "WorkerConfig",
    "check_redis_url",
]
