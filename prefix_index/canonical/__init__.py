"""Canonicalisation: byte splices that let prompts which mean the same share their prefix."""

from prefix_index.canonical.firstseen import FirstSeen, FirstSeenMemory, Peek
from prefix_index.canonical.placement import keeps_system_first
from prefix_index.canonical.rules import (
    RULES,
    AppliedRule,
    Canonical,
    better_form,
    canonicalise,
)

__all__ = [
    "RULES",
    "AppliedRule",
    "Canonical",
    "FirstSeen",
    "FirstSeenMemory",
    "Peek",
    "better_form",
    "canonicalise",
    "keeps_system_first",
]
