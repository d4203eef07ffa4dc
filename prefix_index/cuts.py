"""Where a template's prompts may be cut into segments, about one per message."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from prefix_index.chat import TemplateRefusedError

if TYPE_CHECKING:
    from prefix_index.chat import ChatTemplate
    from prefix_index.tokens import PromptTokenizer

# More kinds of cuts save little: each one costs a pass over the text (2 us per 32 KB).
_MAX_CUT_TOKENS = 3
# Contents that no template prints by itself, to see which special tokens stand between messages.
_PROBE_CONTENTS = ("qzx1", "qzx2", "qzx3")
_PROBE_ROLES = ("user", "assistant", "user")


def choose_cuts(tokenizer: PromptTokenizer, template: ChatTemplate) -> tuple[str, ...]:
    """Return the special tokens at which rendered prompts are cut, best first.

    They are read off a rendered probe: those that stand in the most gaps between messages, so that
    a segment is about one message and a conversation that grew starts with known segments.
    """
    roles = _PROBE_ROLES
    messages = [
        {"role": role, "content": content}
        for role, content in zip(roles, _PROBE_CONTENTS, strict=True)
    ]
    try:
        text = template.render(messages)
    except TemplateRefusedError:
        return ()
    tokens = tokenizer.cut_tokens_in(text)
    gaps = re.split("|".join(_PROBE_CONTENTS), text)
    chosen: list[str] = []
    while gaps and len(chosen) < _MAX_CUT_TOKENS:
        best = max(
            tokens, key=lambda token: (_count(token, gaps), -text.index(token)), default=None
        )
        if best is None or not _count(best, gaps):
            break
        chosen.append(best)
        gaps = [gap for gap in gaps if best not in gap]
    return tuple(chosen)


def _count(token: str, gaps: list[str]) -> int:
    return sum(token in gap for gap in gaps)
