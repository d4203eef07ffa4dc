"""API keys: kept as SHA-256 hashes only, from the environment or from files that may change.

A key is looked up by its hash. That takes the same time whatever was sent: who measures the look-up
learns something about hashes, which cannot be turned into a key, and nobody can choose what a key
of theirs hashes to. The hash that was found is compared in constant time all the same.
"""

from __future__ import annotations

import hmac
import re
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# As `sha256sum` prints it, and as written in the environment, where it must be told from a key.
_HEX_HASH = re.compile(r"[0-9A-Fa-f]{64}")
HASH_PREFIX = "sha256:"
# Ten thousand keys are 650 KB; what is larger is not a file of keys.
MAX_FILE_BYTES = 4 << 20

Digest = bytes


class KeysError(ValueError):
    """Keys cannot be read. The message names the place and never a key."""


def digest_of(key: bytes) -> Digest:
    """Return the hash of a key as it was sent."""
    return sha256(key).digest()


def keys_in_variable(name: str, environ: Mapping[str, str]) -> frozenset[Digest]:
    """Read the keys in an environment variable: one or more, with commas between them.

    Each is a key, or ``sha256:`` and the hash of one in hex.

    Raises:
        KeysError: If the variable is not set, or a hash in it is none.
    """
    given = [part.strip() for part in environ.get(name, "").split(",")]
    digests = frozenset(_digest_in_variable(name, part) for part in given if part)
    if not digests:
        raise KeysError(f"the environment variable {name} is not set; expected API keys in it")
    return digests


def _digest_in_variable(name: str, part: str) -> Digest:
    if not part.startswith(HASH_PREFIX):
        return digest_of(part.encode("utf-8", "surrogateescape"))
    text = part.removeprefix(HASH_PREFIX)
    if not _HEX_HASH.fullmatch(text):
        raise KeysError(f"the environment variable {name}: expected 64 hex digits after sha256:")
    return bytes.fromhex(text)


def keys_in_file(path: str) -> frozenset[Digest]:
    """Read a file with one SHA-256 in hex a line; ``#`` begins a comment.

    Raises:
        KeysError: If it cannot be read or a line is anything else: a key itself does not belong
            there.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise KeysError(f"{path}: expected at most {MAX_FILE_BYTES} bytes")
        text = data.decode()
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror or type(error).__name__}") from error
    except UnicodeDecodeError as error:
        raise KeysError(f"{path}: expected text in UTF-8") from error
    digests = set()
    for number, line in enumerate(text.splitlines(), 1):
        said = line.partition("#")[0].strip().removeprefix(HASH_PREFIX)
        if not said:
            continue
        if not _HEX_HASH.fullmatch(said):
            # The line is not shown: it may be a key.
            raise KeysError(f"{path}:{number}: expected a SHA-256 in hex (64 digits) or a comment")
        digests.add(bytes.fromhex(said))
    return frozenset(digests)


class KeyTable:
    """Whose each key is. Made anew when keys change; never changed.

    Args:
        keys: Tenant -> its keys' hashes.

    Raises:
        KeysError: If two tenants have the same key.
    """

    def __init__(self, keys: Mapping[str, Iterable[Digest]]) -> None:
        self._tenants: dict[Digest, tuple[Digest, str]] = {}
        for tenant, digests in keys.items():
            for digest in digests:
                _, other = self._tenants.setdefault(digest, (digest, tenant))
                if other != tenant:
                    raise KeysError(f"tenants {other!r} and {tenant!r} have a key in common")

    def __len__(self) -> int:
        return len(self._tenants)

    def tenant_of(self, key: bytes) -> str | None:
        """Return whose key this is; None if nobody's. About a microsecond."""
        digest = sha256(key).digest()
        found = self._tenants.get(digest)
        if found is None or not hmac.compare_digest(found[0], digest):
            return None
        return found[1]
