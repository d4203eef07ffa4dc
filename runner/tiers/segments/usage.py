"""How many bytes each namespace holds under a root; what every opener counts against its limit."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

NAMESPACE_FILE = "namespace.json"
LOCK_FILE = "lock"
PROBE_FILE = "direct-io.probe"
SEGMENT_NAME = re.compile(r"seg-(\d{6,})\.kv")
BAD_SUFFIX = ".bad"
TEMPORARY_SUFFIX = ".tmp"

_NAMESPACE_NAME = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """One namespace's directory.

    Attributes:
        directory: Where.
        num_bytes: Of all its files.
        set_aside_bytes: Of its ``.bad`` files among them.
    """

    directory: Path
    num_bytes: int
    set_aside_bytes: int

    @property
    def name(self) -> str:
        """The leading 16 hex digits of the namespace's digest."""
        return self.directory.name

    def facts(self) -> dict[str, object]:
        """Return what its namespace.json says of it; empty if that cannot be read."""
        try:
            content = json.loads((self.directory / NAMESPACE_FILE).read_bytes())
        except (OSError, ValueError):
            return {}
        facts = content.get("facts") if isinstance(content, dict) else None
        return facts if isinstance(facts, dict) else {}


def namespaces(root: Path) -> list[NamespaceUsage]:
    """Return the namespaces under ``root``, by name; what vanishes meanwhile is left out.

    Raises:
        OSError: If ``root`` cannot be listed.
    """
    found = []
    with os.scandir(root) as entries:
        directories = [Path(entry.path) for entry in entries if _is_namespace(entry)]
    for directory in sorted(directories):
        sizes = _file_sizes(directory)
        bad = sum(size for name, size in sizes.items() if name.endswith(BAD_SUFFIX))
        found.append(NamespaceUsage(directory, sum(sizes.values()), bad))
    return found


def _is_namespace(entry: os.DirEntry[str]) -> bool:
    return bool(_NAMESPACE_NAME.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)


def _file_sizes(directory: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue
    except OSError:
        return sizes
    return sizes
