"""What a root of segments holds, and getting rid of it: python -m runner.tiers.segments.clean ROOT.

Every model, dtype, layout and block size has a namespace of its own; those no longer served stay
where they are and count against the size limit until they are deleted here. A namespace that a
runner has open is not touched.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from runner.tiers.segments.errors import SegmentsInUseError
from runner.tiers.segments.locks import DirectoryLock
from runner.tiers.segments.usage import (
    BAD_SUFFIX,
    LOCK_FILE,
    NAMESPACE_FILE,
    PROBE_FILE,
    SEGMENT_NAME,
    TEMPORARY_SUFFIX,
    namespaces,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.tiers.segments.usage import NamespaceUsage


# What a store writes beside segments and lock; the last two only if it was killed while opening.
_OTHER_FILES = (NAMESPACE_FILE, NAMESPACE_FILE + TEMPORARY_SUFFIX, PROBE_FILE)


def delete_namespace(usage: NamespaceUsage) -> int:
    """Delete a namespace's files and directory; returns the bytes freed.

    Files that are not of a segment store are kept, and the directory with them.

    Raises:
        SegmentsInUseError: If a runner has it open.
        OSError: If a file cannot be deleted.
    """
    return _delete(usage, only_set_aside=False)


def delete_set_aside(usage: NamespaceUsage) -> int:
    """Delete the ``.bad`` files of a namespace; returns the bytes freed. Errors as above."""
    return _delete(usage, only_set_aside=True)


def _delete(usage: NamespaceUsage, *, only_set_aside: bool) -> int:
    lock = DirectoryLock(usage.directory)
    freed = 0
    try:
        for path in sorted(usage.directory.iterdir()):
            if only_set_aside:
                is_ours = path.name.endswith(BAD_SUFFIX)
            else:
                is_ours = bool(SEGMENT_NAME.match(path.name)) or path.name in _OTHER_FILES
            if is_ours:
                freed += path.stat().st_size
                path.unlink()
        if not only_set_aside and [path.name for path in usage.directory.iterdir()] == [LOCK_FILE]:
            (usage.directory / LOCK_FILE).unlink()
            usage.directory.rmdir()
    finally:
        lock.release()
    return freed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0 done, 1 failed, 2 usage."""
    parser = argparse.ArgumentParser(
        prog="python -m runner.tiers.segments.clean",
        description="List what each namespace under a directory of segments holds, or delete one.",
    )
    parser.add_argument("root", type=Path, metavar="ROOT", help="what --ssd-dir names")
    parser.add_argument("--delete", metavar="NS", help="delete this namespace")
    parser.add_argument(
        "--delete-bad", metavar="NS", help="delete what was set aside as damaged in this namespace"
    )
    parser.add_argument("--json", action="store_true", help="list as JSON")
    args = parser.parse_args(arguments)
    try:
        found = namespaces(args.root)
        for name, delete in ((args.delete, delete_namespace), (args.delete_bad, delete_set_aside)):
            if name is None:
                continue
            usage = next((usage for usage in found if usage.name == name), None)
            if usage is None:
                parser.error(f"{args.root} has no namespace {name}")
            print(f"{name}: {delete(usage)} bytes freed", file=sys.stderr)
        found = namespaces(args.root)
    except (OSError, SegmentsInUseError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(_as_json(found) if args.json else _as_table(found))
    return 0


def _as_json(found: Sequence[NamespaceUsage]) -> str:
    return json.dumps(
        [
            {
                "namespace": usage.name,
                "bytes": usage.num_bytes,
                "set_aside_bytes": usage.set_aside_bytes,
                "facts": usage.facts(),
            }
            for usage in found
        ]
    )


def _as_table(found: Sequence[NamespaceUsage]) -> str:
    lines = [f"{'namespace':16}  {'bytes':>15}  {'set aside':>15}  facts"]
    for usage in found:
        facts = " ".join(f"{name}={value}" for name, value in usage.facts().items())
        lines.append(
            f"{usage.name:16}  {usage.num_bytes:>15}  {usage.set_aside_bytes:>15}  {facts}"
        )
    lines.append(f"{'total':16}  {sum(usage.num_bytes for usage in found):>15}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
