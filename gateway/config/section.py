"""What all parts of the configuration are made of: the closed section, and checked addresses."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _no_switch(value: object) -> object:
    """Refuse true and false as numbers, which Python has them to be."""
    if isinstance(value, bool):
        told = str(value).lower()
        raise ValueError(f"expected a number, got {told} (YAML reads yes, no, on and off so)")
    return value


NUMBER = BeforeValidator(_no_switch)

Port = Annotated[int, Field(ge=0, le=65535), NUMBER]
PositiveInt = Annotated[int, Field(gt=0), NUMBER]
NonNegativeInt = Annotated[int, Field(ge=0), NUMBER]
Seconds = Annotated[float, Field(gt=0), NUMBER]
# The name of an environment variable. A secret put here by mistake is none, and is not shown.
ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
EnvName = Annotated[str, Field(pattern=ENV_NAME)]
WORKER_ID = r"^[A-Za-z0-9._:-]+$"
Share = Annotated[float, Field(ge=0, le=1), NUMBER]

# tcp://HOST:PORT, where * as the host means that this side listens; or ipc://PATH.
_ZMQ_ADDRESS = re.compile(r"tcp://(?:\*|\[[0-9A-Fa-f:.%]+\]|[^:/\[\]\s*]+):\d{1,5}|ipc://\S+")


class Section(BaseModel):
    """A part of the configuration: immutable, unknown keys refused.

    The docstring under a key is its description in the schema and in docs/reference/config.md.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def check_zmq_address(value: str) -> str:
    """Return ``value`` if ZeroMQ can connect or listen there.

    Raises:
        ValueError: If it cannot; the message says what was expected.
    """
    if not _ZMQ_ADDRESS.fullmatch(value):
        raise ValueError(
            f"expected tcp://HOST:PORT or ipc://PATH (* as HOST listens), got {value!r}"
        )
    return value


def check_worker_url(value: str) -> str:
    """Return ``value`` without a trailing slash if it is an HTTP URL with a host.

    Raises:
        ValueError: If it is not; the message says what was expected (IPv6 hosts in brackets).
    """
    # A password in it is not for logs.
    shown = re.sub(r"//[^/]*@", "//***@", value)
    expected = f"expected http://HOST[:PORT] (an IPv6 host in brackets), got {shown!r}"
    try:
        parts = urlsplit(value)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        valid = valid and (parts.port is None or parts.port > 0)
    except ValueError as error:
        raise ValueError(expected) from error
    if not valid or parts.query or parts.fragment or "@" in parts.netloc or "\\" in value:
        raise ValueError(expected)
    if parts.netloc.count(":") > 1 > value.count("["):
        raise ValueError(expected)
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"expected the address without /v1, which is added, got {shown!r}")
    return value.rstrip("/")


def check_collector_url(value: str) -> str:
    """Return ``value`` if it is an HTTP URL with a host; a path, a user and a query may follow.

    Raises:
        ValueError: If it is not; the message says what was expected.
    """
    try:
        parts = urlsplit(value)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        valid = valid and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or parts.fragment or any(char.isspace() for char in value):
        # The URL itself may carry a password.
        raise ValueError("expected http://HOST[:PORT] of an OTLP collector, or its .../v1/traces")
    return value
