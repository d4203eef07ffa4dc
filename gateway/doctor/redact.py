"""Takes out of admin documents what a bundle must not hold: keys, texts, names of documents.

Names are replaced, not dropped: within one bundle the same name has the same replacement.
"""

from __future__ import annotations

import hashlib
from typing import Any

from gateway.settings import redacted

# Names of documents, sessions and knowledge bases are often names of people and files.
NAMES = frozenset({"document", "version"})
# Within lists of documents, the field ``id`` is one.
ID_LISTS = frozenset({"documents", "warmed"})
# Text around a place; ours or a client's.
TEXTS = frozenset({"text", "text_hint", "value", "before", "after"})
# Advice is ours, and says what to do.
OWN_TEXT_LISTS = frozenset({"advice", "scale_down"})
_DIGITS = 12


class Redactor:
    """Redacts the documents of one bundle.

    Args:
        secret: Of this bundle alone, and thrown away with it: replacements cannot be looked up.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def document(self, value: Any, inside: str = "") -> Any:
        """Return a document without such values.

        Args:
            value: Plain JSON value.
            inside: Name of the list or object that it is in.
        """
        if isinstance(value, dict):
            return {key: self._field(key, item, inside) for key, item in value.items()}
        if isinstance(value, list):
            return [self.document(item, inside) for item in value]
        return redacted(value) if isinstance(value, str) else value

    def _field(self, key: str, value: Any, inside: str) -> Any:
        is_name = key in NAMES or (key == "id" and inside in ID_LISTS)
        if is_name and isinstance(value, str) and value:
            return self.name(value)
        if key in TEXTS and isinstance(value, str) and inside not in OWN_TEXT_LISTS:
            return f"({len(value)} characters)"
        return self.document(value, key)

    def name(self, value: str) -> str:
        """Return what stands for a name."""
        digest = hashlib.blake2b(value.encode("utf-8", "replace"), key=self._secret)
        return f"name-{digest.hexdigest()[:_DIGITS]}"
