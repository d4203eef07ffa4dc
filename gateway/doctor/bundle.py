"""``warmlane doctor --bundle``: what support asks for, in one archive, without secrets.

Works as far as possible while the gateway is away: what could not be had is named in
``manifest.json`` with the reason.
"""

from __future__ import annotations

import io
import json
import os
import platform
import sys
import tarfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Any

from gateway.client import get_json, get_text
from gateway.doctor.checklist.facts import DOCUMENTS
from gateway.doctor.redact import Redactor
from gateway.settings import ConfigError, describe, load, redacted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Asked of the gateway: file -> path.
ASKED = {name: path for name, path in DOCUMENTS.items() if name != "config"} | {
    "workers": "/admin/v1/workers",
    "usage": "/admin/v1/usage",
    "config": "/admin/v1/config",
    # The last decisions, and which alerts hold.
    "console": "/console/data",
}
# Whose versions matter: what speaks HTTP, reads prompts, talks to engines and Redis.
PACKAGES = frozenset(
    {"warmlane", "aiohttp", "httpx", "msgspec", "orjson", "prometheus-client", "pydantic"}
    | {"pyyaml", "pyzmq", "redis", "structlog", "tokenizers", "torch", "jinja2", "uvloop"}
    | {"opentelemetry-sdk", "uhashring", "xxhash"}
)
FOLDER = "warmlane-bundle"


@dataclass(slots=True)
class Bundle:
    """The archive in the making.

    Attributes:
        files: Name -> content.
        missing: Name -> why it is not there.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, make: Callable[[], bytes]) -> None:
        """Add a file, or note why not."""
        try:
            self.files[name] = make()
        except (ConnectionError, ConfigError, OSError) as error:
            self.missing[name] = redacted(str(error))

    def manifest(self, gateway: str, now: datetime) -> dict[str, Any]:
        """Return what is in it and what is not."""
        return {
            "created": now.isoformat(timespec="seconds"),
            "gateway": redacted(gateway),
            "files": {name: len(content) for name, content in sorted(self.files.items())},
            "missing": dict(sorted(self.missing.items())),
        }


def collect(gateway: str, token: str | None, config: str | None, *, secret: bytes) -> Bundle:
    """Ask for everything; never raises for what is not there.

    Args:
        gateway: Base URL.
        token: The admin token; not part of the archive.
        config: A configuration file of this machine; None = the environment's alone.
        secret: For replacing names; of this bundle alone.
    """
    redactor, bundle = Redactor(secret), Bundle()
    for name, path in ASKED.items():
        bundle.add(
            f"{name}.json",
            lambda name=name, path=path: _json(  # type: ignore[misc]
                redactor.document(get_json(gateway, path, token), name)
            ),
        )
    bundle.add("health.txt", lambda: get_text(gateway, "/health/ready", token).encode())
    bundle.add("metrics.txt", lambda: get_text(gateway, "/metrics", token).encode())
    if config is not None:
        bundle.add("config-local.json", lambda: _json(_local(config)))
    bundle.add("versions.json", lambda: _json(_versions()))
    return bundle


def write(bundle: Bundle, path: Path, gateway: str, now: datetime) -> dict[str, Any]:
    """Write the archive, readable by its owner alone; return its manifest.

    Raises:
        FileExistsError: If there is such a file already.
        OSError: If it cannot be written.
    """
    manifest = bundle.manifest(gateway, now)
    files = {"manifest.json": _json(manifest), **bundle.files}
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target:
        # Whatever the umask is: nobody else's.
        os.fchmod(target.fileno(), 0o600)
        with tarfile.open(fileobj=target, mode="w:gz") as archive:
            for name, content in files.items():
                entry = tarfile.TarInfo(f"{FOLDER}/{name}")
                entry.size, entry.mode, entry.mtime = len(content), 0o600, int(now.timestamp())
                archive.addfile(entry, io.BytesIO(content))
    return manifest


def default_name(now: datetime) -> str:
    """Return the archive's name where none is given."""
    return f"{FOLDER}-{now.astimezone(UTC):%Y%m%dT%H%M%SZ}.tar.gz"


def _local(config: str) -> list[dict[str, Any]]:
    settings, layered = load(config)
    names = ("key", "value", "source")
    return [dict(zip(names, row, strict=True)) for row in describe(settings, layered)]


def _versions() -> dict[str, Any]:
    found = {found.metadata["Name"].lower(): found.version for found in distributions()}
    return {
        "python": sys.version,
        "platform": platform.platform(),
        "packages": {name: found[name] for name in sorted(PACKAGES) if name in found},
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()
