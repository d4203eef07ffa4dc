"""The command ``warmlane warmup`` (``python -m warmup``): plan, run, verify, status.

Data goes to stdout, talk to stderr. Exit codes: 0 done, 1 failed, 2 usage (the manifest included),
3 partial, 130 interrupted. Heavy imports stand inside the commands: ``--help`` is quick.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, Any

import typer

from warmup.options import Options

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
TOKEN_ENV = "WARMLANE_ADMIN_TOKEN"  # noqa: S105  # the name of a variable

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's help costs a third of a second
    help="Make documents warm before their users come, and prove it.",
)

ManifestArgument = Annotated[
    str | None, typer.Argument(metavar="MANIFEST", help="YAML file; none with --from-live.")
]
GatewayOption = Annotated[
    str | None,
    typer.Option(
        "--gateway",
        envvar="WARMLANE_GATEWAY",
        help="Base URL of the gateway (default: the manifest's, then http://127.0.0.1:8080).",
    ),
]
TokenOption = Annotated[
    str, typer.Option("--token-env", metavar="NAME", help="Variable that holds the admin token.")
]
LiveOption = Annotated[
    bool, typer.Option("--from-live", help="What the gateway itself has found hot, no manifest.")
]
LimitOption = Annotated[int, typer.Option(min=1, help="With --from-live: how many at most.")]
ModelOption = Annotated[
    str | None, typer.Option(help="With --from-live: only what is hot for this model.")
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout", min=0.0, help="Seconds the gateway may be away, or silent, before giving up."
    ),
]
ConcurrencyOption = Annotated[
    int, typer.Option(min=1, max=64, help="Documents at a time on a worker.")
]
ShareOption = Annotated[
    float,
    typer.Option(
        "--max-prefill-share",
        min=0.01,
        max=1.0,
        help="Of each worker's prefill, while users' requests are there too.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout (run: one event a line).")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Only trouble on stderr.")]
ColorOption = Annotated[bool, typer.Option("--no-color", help="No colours, as with NO_COLOR.")]


@app.command()
def plan(
    manifest: ManifestArgument = None,
    gateway: GatewayOption = None,
    token_env: TokenOption = TOKEN_ENV,
    from_live: LiveOption = False,
    limit: LimitOption = 100,
    model: ModelOption = None,
    timeout_s: TimeoutOption = 60.0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say what a run would do: worker, tokens, bytes, seconds and gain of every copy.

    Exits with 3 if something in the manifest would not be warm after a run.
    """
    options = Options(
        **_common(manifest, gateway, token_env, from_live, limit, model),
        timeout_s=timeout_s,
        as_json=as_json,
        quiet=quiet,
    )
    from warmup.commands import plan as command

    raise typer.Exit(command(options))


@app.command()
def run(
    manifest: ManifestArgument = None,
    gateway: GatewayOption = None,
    token_env: TokenOption = TOKEN_ENV,
    from_live: LiveOption = False,
    limit: LimitOption = 100,
    model: ModelOption = None,
    concurrency: ConcurrencyOption = 2,
    max_prefill_share: ShareOption = 0.25,
    timeout_s: TimeoutOption = 300.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask on a terminal.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    no_color: ColorOption = False,
) -> None:
    """Warm what the manifest names, and prove it. Running it again computes nothing.

    Ctrl-C stops sending, waits for what is in flight and says what is warm.
    """
    options = Options(
        **_common(manifest, gateway, token_env, from_live, limit, model),
        concurrency=concurrency,
        max_share=max_prefill_share,
        timeout_s=timeout_s,
        yes=yes,
        as_json=as_json,
        quiet=quiet,
        no_color=no_color,
    )
    from warmup.commands import run as command

    raise typer.Exit(command(options))


@app.command()
def verify(
    manifest: ManifestArgument = None,
    gateway: GatewayOption = None,
    token_env: TokenOption = TOKEN_ENV,
    from_live: LiveOption = False,
    limit: LimitOption = 100,
    model: ModelOption = None,
    timeout_s: TimeoutOption = 300.0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Prove for every document and worker that it is warm; warms nothing.

    Exits with 3 if something is not, naming document and worker.
    """
    options = Options(
        **_common(manifest, gateway, token_env, from_live, limit, model),
        timeout_s=timeout_s,
        as_json=as_json,
        quiet=quiet,
    )
    from warmup.commands import verify as command

    raise typer.Exit(command(options))


@app.command()
def status(
    gateway: GatewayOption = None, token_env: TokenOption = TOKEN_ENV, as_json: JsonOption = False
) -> None:
    """Show the gateway's current and last warm-ups."""
    options = Options(gateway=gateway, token=_token(token_env), as_json=as_json)
    from warmup.commands import status as command

    raise typer.Exit(command(options))


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; what went wrong is said on stderr."""
    args = sys.argv[1:] if argv is None else argv
    # A pod is ended by SIGTERM: that is an operator's Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app(args, prog_name="warmlane warmup")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read stdout has seen enough; the interpreter would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return 0


def _common(
    manifest: str | None,
    gateway: str | None,
    token_env: str,
    from_live: bool,
    limit: int,
    model: str | None,
) -> dict[str, Any]:
    if from_live == (manifest is not None):
        raise typer.BadParameter("expected either MANIFEST or --from-live")
    if model is not None and not from_live:
        raise typer.BadParameter("--model goes with --from-live; a manifest names its model")
    return {
        "manifest": manifest,
        "gateway": gateway,
        "token": _token(token_env),
        "live_limit": limit if from_live else None,
        "model": model,
    }


def _token(name: str) -> str | None:
    """Return the admin token in a variable, which has to be set if it was named."""
    token = os.environ.get(name, "").strip()
    if not token and name != TOKEN_ENV:
        raise typer.BadParameter(f"--token-env: the variable {name} is not set")
    if not (token.isascii() and token.isprintable()):
        raise typer.BadParameter(f"--token-env: {name} holds characters that no token has")
    return token or None


if __name__ == "__main__":
    sys.exit(main())
