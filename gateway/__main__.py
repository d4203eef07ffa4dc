"""The gateway's commands, from ``serve`` to ``config``.

Data goes to stdout, talk to stderr. Exit codes: 0 done, 1 failed, 2 usage, 3 partial,
130 interrupted. Heavy imports stand inside the commands that need them: ``--help`` is quick.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.settings import Location

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
config_app = typer.Typer(no_args_is_help=True, help="Check, show or describe the configuration.")
workers_app = typer.Typer(
    no_args_is_help=True, help="List, add, drain or remove workers of a running gateway."
)
app.add_typer(config_app, name="config")
app.add_typer(workers_app, name="workers")

ConfigOption = Annotated[str | None, typer.Option("--config", "-c", help="YAML file.")]


def _base_url(value: str) -> str:
    """Refuse what no admin path can be put behind.

    Raises:
        typer.BadParameter: If it is no base URL; the message says what was expected.
    """
    base = value.rstrip("/")
    if not base.startswith(("http://", "https://")) or base.endswith("/v1"):
        raise typer.BadParameter(f"expected http://HOST:PORT, without /v1, got {value!r}")
    return base


GatewayOption = Annotated[str, typer.Option(help="Base URL of the gateway.", callback=_base_url)]
TokenOption = Annotated[
    str | None, typer.Option(envvar="WARMLANE_ADMIN_TOKEN", help="The admin token, if one is set.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
DEFAULT_GATEWAY = "http://127.0.0.1:8080"
# "Partial": the gateway answers, but something costs hits.
EXIT_FINDINGS = 3


class CommandError(Exception):
    """A command failed; the message is for whoever typed it."""


@app.command()
def serve(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks one.")
    ] = None,
    worker: Annotated[
        list[str] | None, typer.Option(help="URL of a worker; may be given several times.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name clients ask for.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder with tokenizer.json and tokenizer_config.json.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="runner, vllm, sglang or openai (default: openai).")
    ] = None,
) -> None:
    """Run the gateway until SIGTERM or Ctrl-C."""
    flags: dict[Location, Any] = {}
    if host is not None:
        flags["server", "host"] = host
    if port is not None:
        flags["server", "port"] = port
    if config is None:
        flags[("pools",)] = [_pool_from_flags(worker, model, tokenizer, engine)]
    elif worker or model or tokenizer or engine:
        raise typer.BadParameter("--worker, --model, --tokenizer and --engine go without --config")
    with _config_errors():
        from gateway.launch import serve_forever
        from gateway.reload.reloader import ConfigFile

        code = serve_forever(ConfigFile(config, flags))
    raise typer.Exit(code)


@app.command()
def demo(
    once: Annotated[bool, typer.Option("--once", help="Stop after the table.")] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the gateway.")] = 8080,
    as_json: JsonOption = False,
) -> None:
    """Start two bundled engines and the gateway, send a short workload, print one table."""
    from gateway.demo import DemoError, run

    try:
        raise typer.Exit(run(port=port, once=once, as_json=as_json))
    except DemoError as error:
        raise CommandError(str(error)) from error


@app.command()
def bench(
    model: Annotated[
        str | None, typer.Option(help="Model to ask for; left out where there is one.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 64,
    documents: Annotated[
        int, typer.Option(min=1, help="Documents they are about, popular ones more often.")
    ] = 8,
    words: Annotated[int, typer.Option(min=1, help="Words of a document.")] = 1000,
    concurrency: Annotated[int, typer.Option(min=1, help="Clients that ask at a time.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 16,
    seed: Annotated[
        int | None, typer.Option(help="The same one asks the same; new documents if left out.")
    ] = None,
    gateway: Annotated[
        str, typer.Option(help="Base URL of a gateway or an engine.", callback=_base_url)
    ] = DEFAULT_GATEWAY,
    key: Annotated[
        str | None, typer.Option(envvar="WARMLANE_API_KEY", help="A client's API key.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Send questions about documents and say what clients see: TTFT, cached tokens, failures.

    Exits with 0 if all were answered, 3 if some failed, 1 if all did.
    """
    from gateway.bench.command import ModelNeededError, run

    try:
        code = run(
            gateway,
            model,
            key,
            num_requests=requests,
            num_documents=documents,
            num_words=words,
            concurrency=concurrency,
            max_tokens=max_tokens,
            seed=seed,
            as_json=as_json,
        )
    except ModelNeededError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(code)


@app.command()
def explain(
    file: Annotated[str, typer.Argument(help="A request body as JSON; - reads stdin.")],
    gateway: GatewayOption = DEFAULT_GATEWAY,
    token: TokenOption = None,
    _as_json: JsonOption = False,
) -> None:
    """Say where a request would go, and why, without sending it; always as JSON."""
    from gateway.client import post_json

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
        body = json.loads(text)
    except (OSError, ValueError) as error:
        raise CommandError(f"{file}: expected a JSON request body: {error}") from error
    print(json.dumps(post_json(gateway, "/admin/v1/explain", body, token), indent=2))


@app.command()
def doctor(
    file: Annotated[
        Path | None, typer.Argument(help="With --bundle: the archive to write.")
    ] = None,
    checklist: Annotated[
        bool, typer.Option("--checklist", help="Go through the go-live checklist instead.")
    ] = False,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="Write what support asks for, without secrets.")
    ] = False,
    prometheus: Annotated[
        str | None, typer.Option(help="With --checklist: base URL of the Prometheus that watches.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", help="With --bundle: YAML to add, redacted."),
    ] = None,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what costs prefix hits, most tokens first, and what to do about it.

    Exits with 0 if there is nothing to mend, 3 if there is, 1 if the gateway does not answer.
    --checklist: 0 if all lines pass, 3 if some warn or are unknown, 1 if any fails.
    --bundle [FILE]: 0 if all is in it, 3 if something could not be had, 1 if it cannot be written.
    """
    if checklist and bundle:
        raise typer.BadParameter("--checklist and --bundle are two commands; give one")
    if (file is not None or config is not None) and not bundle:
        raise typer.BadParameter("FILE and --config go with --bundle")
    if prometheus is not None and not checklist:
        raise typer.BadParameter("--prometheus goes with --checklist")
    if checklist:
        from gateway.doctor.command import run_checklist

        raise typer.Exit(run_checklist(gateway, token, prometheus, as_json=as_json))
    if bundle:
        from gateway.doctor.command import run_bundle

        raise typer.Exit(run_bundle(gateway, token, config, file, as_json=as_json))
    from gateway.doctor.diagnosis import ask
    from gateway.doctor.table import table

    diagnosis = ask(gateway, token)
    print(json.dumps(diagnosis.to_json(), indent=2) if as_json else table(diagnosis))
    if not diagnosis.is_healthy:
        raise typer.Exit(EXIT_FINDINGS)


@workers_app.command("list")
def workers_list(
    gateway: GatewayOption = DEFAULT_GATEWAY,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """List workers with their mode, health, load, event lag and gaps, and blocks per tier."""
    from gateway.client import get_json, workers_table

    answer = get_json(gateway, "/admin/v1/workers", token)
    print(json.dumps(answer, indent=2) if as_json else workers_table(answer["workers"]))


@workers_app.command("add")
def workers_add(
    url: Annotated[str, typer.Argument(help="Base URL of the worker, without /v1.")],
    pool: Annotated[str | None, typer.Option(help="Its pool; left out where there is one.")] = None,
    worker_id: Annotated[str | None, typer.Option("--id", help="Its id.")] = None,
    kv_events: Annotated[str | None, typer.Option(help="Where it publishes KV events.")] = None,
    kv_replay: Annotated[str | None, typer.Option(help="Where it replays them.")] = None,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a worker join a pool, if `worker_allow` lets it be where it is."""
    from gateway.client import post_json, workers_table

    said = {"url": url, "pool": pool, "id": worker_id, "kv_events": kv_events}
    said["kv_replay"] = kv_replay
    body = {name: value for name, value in said.items() if value is not None}
    answer = post_json(gateway, "/admin/v1/workers", body, token)
    print(json.dumps(answer, indent=2) if as_json else workers_table(answer["workers"]))


@workers_app.command("remove")
def workers_remove(
    worker: Annotated[str, typer.Argument(help="Id of the worker, as `workers list` shows it.")],
    gateway: GatewayOption = DEFAULT_GATEWAY,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a worker out of its pool; its running requests go on."""
    from urllib.parse import quote

    from gateway.client import delete_json

    answer = delete_json(gateway, f"/admin/v1/workers/{quote(worker, safe='')}", token)
    print(json.dumps(answer, indent=2) if as_json else f"removed {answer['removed']}")


@workers_app.command("drain")
def workers_drain(
    worker: Annotated[str, typer.Argument(help="Id of the worker, as `workers list` shows it.")],
    gateway: GatewayOption = DEFAULT_GATEWAY,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a worker no new requests; those that run there go on."""
    from urllib.parse import quote

    from gateway.client import post_json, workers_table

    path = f"/admin/v1/workers/{quote(worker, safe='')}/drain"
    row = post_json(gateway, path, {}, token)
    print(json.dumps(row, indent=2) if as_json else workers_table([row]))


@config_app.command("check")
def config_check(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Say whether the configuration can be used; errors name file and line."""
    from gateway.settings import ConfigError, load
    from gateway.unsupported import files_not_here, unsupported, variables_not_here

    errors: list[str] = []
    warnings: list[str] = []
    try:
        settings, _ = load(config)
        errors, warnings = unsupported(settings)
        warnings += files_not_here(settings) + variables_not_here(settings)
    except ConfigError as error:
        errors = str(error).splitlines()
    if as_json:
        print(json.dumps({"ok": not errors, "errors": errors, "warnings": warnings}, indent=2))
    else:
        for line in [*(f"error: {e}" for e in errors), *(f"warning: {w}" for w in warnings)]:
            print(line, file=sys.stderr)
        print("not usable" if errors else "ok")
    if errors:
        raise typer.Exit(1)


@config_app.command("show")
def config_show(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Print every value that holds, and where it comes from."""
    with _config_errors():
        from gateway.settings import describe, load

        settings, layered = load(config)
        rows = describe(settings, layered)
    if as_json:
        print(json.dumps([dict(zip(("key", "value", "source"), r, strict=True)) for r in rows]))
    else:
        for key, value, source in rows:
            print(f"{key} = {json.dumps(value)}  # {source}")


@config_app.command("schema")
def config_schema(_as_json: JsonOption = False) -> None:
    """Print the JSON Schema of the configuration, for editors; always as JSON."""
    from gateway.config import Settings

    print(json.dumps(Settings.model_json_schema(), indent=2))


def all_commands() -> typer.Typer:
    """Return all commands, those that are slow to import as well."""
    from gateway.replay.command import replay

    if replay not in [command.callback for command in app.registered_commands]:
        app.command()(replay)
    return app


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; what went wrong is said on stderr."""
    args = sys.argv[1:] if argv is None else argv
    # The options of replay are its own, and reading them costs others a tenth of a second.
    commands = all_commands() if args[:1] in ([], ["--help"], ["replay"]) else app
    try:
        commands(args, prog_name="warmlane")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except (CommandError, ConnectionError) as error:
        print(f"warmlane: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _config_errors() -> Iterator[None]:
    """Turn what is wrong with a configuration into a command's error.

    The settings are imported here and not above: most commands do without, and start in half the
    time.
    """
    from gateway.settings import ConfigError

    try:
        yield
    except ConfigError as error:
        raise CommandError(str(error)) from error


def _pool_from_flags(
    workers: list[str] | None, model: str | None, tokenizer: str | None, engine: str | None
) -> dict[str, Any]:
    if not workers or model is None:
        raise typer.BadParameter("expected --config FILE, or --worker URL (repeatable) and --model")
    pool: dict[str, Any] = {
        "name": model,
        "models": [model],
        "engine": engine or "openai",
        "workers": [{"id": f"w{i}", "url": url} for i, url in enumerate(workers)],
    }
    if tokenizer is not None:
        pool["tokenizer"] = tokenizer
    return pool


if __name__ == "__main__":
    sys.exit(main())
