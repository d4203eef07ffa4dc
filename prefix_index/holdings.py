"""Tiers, and the copies of a block in them packed into one int.

16 bits a tier in the order of ``TIERS``: engines store one hash several times and remove each copy.
"""

from __future__ import annotations

from typing import Final, Literal

Tier = Literal["gpu", "cpu", "disk", "remote"]
TIERS: Final[tuple[Tier, ...]] = ("gpu", "cpu", "disk", "remote")

_TIER_BITS: Final = 16
# A count that would pass this stays here: re-announced hits must not run into the next tier.
_MAX_COUNT: Final = (1 << _TIER_BITS) - 1
MAX_COPIES: Final = (1 << _TIER_BITS * len(TIERS)) - 1
ONE_GPU_COPY: Final = 1
SHIFT: Final[dict[Tier, int]] = {tier: i * _TIER_BITS for i, tier in enumerate(TIERS)}


def count(copies: int, tier: Tier) -> int:
    """Return how many of the copies are in a tier."""
    return copies >> SHIFT[tier] & _MAX_COUNT


def plus_one(copies: int, tier: Tier) -> int:
    """Return the copies with one more in a tier, at most 65,535."""
    return copies if count(copies, tier) == _MAX_COUNT else copies + (1 << SHIFT[tier])


def minus_one(copies: int, tier: Tier) -> int:
    """Return the copies with one less in a tier, if it has any."""
    return copies - (1 << SHIFT[tier]) if count(copies, tier) else copies


def best_tier(copies: int) -> Tier:
    """Return the fastest tier that has a copy; there must be one."""
    return next(tier for tier in TIERS if count(copies, tier))


def is_below(copies: int) -> bool:
    """Say whether there are copies, but none in GPU memory."""
    return copies != 0 and not copies & _MAX_COUNT
