"""What a command was told on its command line, apart from how it was spelled there."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of all commands; each looks at those it has.

    Attributes:
        manifest: Path; None with ``live_limit``, and for ``status``.
        gateway: Base URL; None leaves it to the manifest.
        token: The admin token; not in the representation.
        live_limit: Warm so many of the gateway's own hot list.
        model: Of that list only what is for this model.
        concurrency: Documents at a time on each worker.
        max_share: Of the workers' prefill, beside live traffic.
        timeout_s: How long the gateway may be away.
        yes: Do not ask.
        as_json: Programs read stdout.
        quiet: Only trouble on stderr.
        no_color: No colours.
    """

    manifest: str | None = None
    gateway: str | None = None
    live_limit: int | None = None
    model: str | None = None
    concurrency: int = 2
    max_share: float = 0.25
    timeout_s: float = 300.0
    yes: bool = False
    as_json: bool = False
    quiet: bool = False
    no_color: bool = False
    token: str | None = field(default=None, repr=False)
