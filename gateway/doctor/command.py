"""``warmlane doctor --checklist`` and ``--bundle`` as commands: data on stdout, talk on stderr."""

from __future__ import annotations

import json
import secrets
import sys
from datetime import UTC, datetime
from pathlib import Path

from gateway.doctor.bundle import collect, default_name, write
from gateway.doctor.checklist.facts import gather
from gateway.doctor.checklist.run import run

EXIT_DONE, EXIT_FAILED, EXIT_PARTIAL = 0, 1, 3


def run_checklist(gateway: str, token: str | None, prometheus: str | None, *, as_json: bool) -> int:
    """Go through the checklist of a running gateway and print it; return the exit code.

    Raises:
        ConnectionError: If the gateway does not answer.
    """
    found = run(gather(gateway, token, prometheus, _say))
    print(json.dumps(found.to_json(), indent=2) if as_json else found.to_text())
    return found.exit_code


def run_bundle(
    gateway: str, token: str | None, config: str | None, path: Path | None, *, as_json: bool
) -> int:
    """Write a bundle and say where it is; return the exit code."""
    now = datetime.now(UTC)
    target = path or Path(default_name(now))
    bundle = collect(gateway, token, config, secret=secrets.token_bytes(16))
    try:
        manifest = write(bundle, target, gateway, now)
    except OSError as error:
        _say(f"{target}: {error.strerror}")
        return EXIT_FAILED
    for name, why in manifest["missing"].items():
        _say(f"missing: {name}: {why}")
    print(json.dumps({"file": str(target), **manifest}, indent=2) if as_json else target)
    return EXIT_PARTIAL if manifest["missing"] else EXIT_DONE


def _say(text: str) -> None:
    print(text, file=sys.stderr)
