"""Names of keys. What belongs together carries one hash tag, so that it stays in one cluster slot.

``namespace:v1:{pool}:part:part``. The schema version stands in every key, so that two versions of
the gateway can run side by side during a roll-out, each with its own state.
"""

from __future__ import annotations

from typing import Final

# Raised whenever a value's format changes: old and new gateways then do not read each other.
SCHEMA: Final = "v1"

_ESCAPES: Final = str.maketrans({"%": "%25", "{": "%7B", "}": "%7D"})


def make_key(namespace: str, pool: str, *parts: str) -> str:
    """Return a key; braces in names are escaped, since only the first pair is the hash tag."""
    tag = f"{namespace.translate(_ESCAPES)}:{SCHEMA}:{{{pool.translate(_ESCAPES)}}}"
    return ":".join((tag, *parts))
