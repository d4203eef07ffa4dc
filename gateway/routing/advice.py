"""What an operator could do to make a prompt hit more, in bounded words that never quote a user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefix_index.segments import Found, stable_end

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prefix_index.segments import Layout

# Less is not worth a word: four blocks of the usual size.
MIN_TOKENS = 64
# A prompt has few causes; the first in a segment spoils what is behind it anyway.
MAX_ADVICE = 8
# Segments in which a change costs all that follows, and whose text an application writes.
_WRITTEN = ("system", "tools", "knowledge")


def advice_of(
    layout: Layout, *, pool: str, num_tokens: int, block_size: int
) -> list[dict[str, Any]]:
    """Return advice: kind, segment, start_token, tokens (what it costs per request) and text.

    Args:
        layout: Of the prompt.
        pool: The pool's name, whose template it is.
        num_tokens: Prompt tokens.
        block_size: Tokens per block: what shares one with a change is lost too.
    """
    end = stable_end(layout.segments) or num_tokens
    found = [
        *_template(layout, pool, end, block_size),
        *_volatile(layout, end, num_tokens, block_size),
    ]
    return [*found, *_moved(layout)][:MAX_ADVICE]


def _template(layout: Layout, pool: str, end: int, block_size: int) -> Iterator[dict[str, Any]]:
    for segment in layout.segments:
        for span in segment.volatile:
            if isinstance(span, Found) and span.source == "template":
                behind = max(0, end - span.start_token // block_size * block_size)
                yield {
                    "kind": "template_prints_date",
                    "segment": segment.kind,
                    "start_token": span.start_token,
                    "tokens": behind,
                    "text": f"The chat template of pool {pool} prints the {span.kind} "
                    f"{span.value[:48]!r} at token {span.start_token}: when it changes, the "
                    f"{behind} stable tokens from there on are computed again.",
                }
                return


def _volatile(
    layout: Layout, end: int, num_tokens: int, block_size: int
) -> Iterator[dict[str, Any]]:
    for segment in layout.segments:
        spans = [v for v in segment.volatile if isinstance(v, Found) and v.source != "template"]
        if segment.kind not in _WRITTEN or not spans:
            continue
        span = spans[0]
        behind = max(0, end - span.start_token // block_size * block_size)
        if behind < MIN_TOKENS:
            continue
        yield {
            "kind": "volatile_text",
            "segment": segment.kind,
            "start_token": span.start_token,
            "tokens": behind,
            "text": f"A {span.kind} at {_position(span.start_token, num_tokens)} (token "
            f"{span.start_token} of {num_tokens}, in {segment.kind}): if it changes per request, "
            f"its position costs the {behind} stable tokens from there on. Put it behind them, or "
            "leave it out.",
        }


def _moved(layout: Layout) -> Iterator[dict[str, Any]]:
    totals: dict[str, tuple[int, int]] = {}
    for moved in layout.moved:
        start, tokens = totals.get(moved.kind, (moved.start_token, 0))
        totals[moved.kind] = (start, tokens + moved.num_tokens)
    for kind, (start, tokens) in totals.items():
        if tokens < MIN_TOKENS:
            continue
        yield {
            "kind": "stable_text_behind_changing_text",
            "segment": kind,
            "start_token": start,
            "tokens": tokens,
            "text": f"{tokens} tokens of recurring text (in {kind}, from token {start}) stand "
            "behind text that changes, so they are computed again each time. Put them first.",
        }


def _position(token: int, num_tokens: int) -> str:
    share = token / max(1, num_tokens)
    if share < 0.1:
        return "the start of the prompt"
    return "the middle of the prompt" if share < 0.9 else "the end of the prompt"
