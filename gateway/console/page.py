"""The page as bytes, with headers that let nothing run in it but its own script."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class Page(NamedTuple):
    """A whole answer."""

    body: bytes
    headers: dict[str, str]


def load_page(*, needs_token: bool) -> Page:
    """Read the page from the package.

    Its one script and one style are allowed by their hashes; the page cannot be framed, sends
    nothing anywhere but here, and makes no markup from text.

    Args:
        needs_token: Whether its data needs a token, so that it asks for one at once.
    """
    text = files("gateway.console").joinpath("console.html").read_text("utf-8")
    access = "token" if needs_token else "open"
    text = text.replace('data-access="open"', f'data-access="{access}"', 1)
    hashes = {kind: _csp_hash(inline) for kind, inline in _INLINE.findall(text)}
    policy = (
        "default-src 'none'",
        f"script-src {hashes['script']}",
        f"style-src {hashes['style']}",
        "connect-src 'self'",
        "img-src data:",  # the icon, without which browsers ask for one
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    body = text.encode()
    return Page(
        body,
        {
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": "; ".join(policy),
            "cache-control": "no-cache",
            "etag": f'"{sha256(body).hexdigest()[:32]}"',
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
        },
    )


def _csp_hash(inline: str) -> str:
    return f"'sha256-{b64encode(sha256(inline.encode()).digest()).decode()}'"
