"""Attention masks for torch's own attention, which takes padded or gathered contexts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from runner.batch import AttentionGroup


def single_mask(group: AttentionGroup, window: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return what hides the padding of the shorter samples; None if nothing is hidden.

    Made once per step and window, then kept with the group.

    Args:
        group: Samples of one token each.
        window: Most tokens that are looked back on, itself included; 0 for all.
        dtype: Of the mask.

    Returns:
        Added to scores: 0 or -inf. Shape: [samples, 1, 1, context].
    """
    if window not in group.masks:
        at, ends = np.arange(group.context), group.ends[:, None]
        hidden = (at >= ends) | (at < ends - window) if window else at >= ends
        mask = None
        if hidden.any():
            mask = torch.zeros(hidden.shape, dtype=dtype)
            mask = mask.masked_fill_(torch.from_numpy(hidden), -torch.inf)[:, None, None]
        group.masks[window] = mask
    return group.masks[window]


def chunk_mask(group: AttentionGroup, window: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return what hides later tokens and those beyond the window; None for plain causal.

    Args, kept as in ``single_mask``. Shape: [tokens, context].
    """
    if window >= group.context:
        window = 0
    if window not in group.masks:
        length = group.rows.stop - group.rows.start
        start = group.context - length
        mask = None
        if start or window:
            mask = torch.full((length, group.context), -torch.inf, dtype=dtype).triu_(start + 1)
        if mask is not None and window:
            mask += torch.full_like(mask, -torch.inf).tril_(start - window)
        group.masks[window] = mask
    return group.masks[window]
