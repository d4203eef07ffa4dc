"""Cache salts: what keeps a tenant's KV apart from everybody else's, in engines and in the index.

``HMAC-SHA256(secret, tenant)``: equal in all gateways and after restarts, and without the secret
nobody can tell it from the tenant's name.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Members by which engines are told a salt: vLLM's, SGLang's and the runner's, and SGLang's other.
SALT_FIELD = "cache_salt"
SALT_FIELDS = (SALT_FIELD, "extra_key")
# Engines that take no salt: nothing is known of what is behind an OpenAI-compatible address.
UNSALTED_ENGINES = frozenset({"openai"})
# Below it a secret can be guessed by trying.
MIN_SECRET_CHARS = 16


class SecretError(ValueError):
    """The secret cannot be used. The message never shows it."""


def read_secret(name: str, environ: Mapping[str, str]) -> bytes:
    """Read the secret of all salts from an environment variable.

    Raises:
        SecretError: If it is not there or too short.
    """
    secret = environ.get(name, "")
    if len(secret) < MIN_SECRET_CHARS:
        what = "is shorter" if secret else "is not set"
        raise SecretError(
            f"the environment variable {name} {what}: expected a secret of at least "
            f"{MIN_SECRET_CHARS} characters, the same for all gateways"
        )
    return secret.encode("utf-8", "surrogateescape")


def salt_of(secret: bytes, tenant: str) -> str:
    """Return a tenant's salt: 64 hex digits."""
    return hmac.digest(secret, tenant.encode(), "sha256").hex()


def salt_within(salt: str, given: str) -> str:
    """Return the salt of one part of a tenant, which a trusted peer tells apart by ``given``."""
    return hmac.digest(salt.encode(), given.encode("utf-8", "surrogatepass"), "sha256").hex()
