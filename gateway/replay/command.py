"""``warmlane replay``: what routing would have done with your traffic, in simulated time."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003  # typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import msgspec
import typer

from gateway.replay import report
from gateway.replay.options import (
    OptionError,
    failure,
    load_delay,
    number,
    numbers,
    scalings,
    seconds,
)
from gateway.replay.presets import load_engine_model
from gateway.replay.registry import NAMES, PolicyError, check_policy
from gateway.replay.runs import Setup, capacity, check_fits, run
from gateway.replay.simulate import Load
from gateway.replay.summary import Slo
from gateway.replay.traces import TraceError, read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.replay.engine import EngineModel
    from gateway.replay.summary import Summary
    from gateway.replay.traces import Trace

# Loads that a plot shows if only one was given, as multiples of it.
PLOT_LOADS = (0.5, 0.75, 1.0, 1.25)
GB = 1e9


class _Job(NamedTuple):
    """One run that was asked for."""

    policy: str
    load: float
    draw: int


def replay(
    trace: Annotated[str, typer.Argument(help="Trace or decision log, plain or gzipped.")],
    workers: Annotated[int, typer.Option(help="Workers of the simulated fleet.")] = 16,
    policy: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(NAMES)}.")] = (
        "ours,round_robin,least_requests"
    ),
    load: Annotated[
        str, typer.Option(help="How much faster than recorded; several, comma-separated.")
    ] = "1",
    replicas: Annotated[int, typer.Option(help="Gateways that share the traffic.")] = 1,
    load_delay_text: Annotated[
        str, typer.Option("--load-delay", help="How often they share load: 50ms, 1s, none.")
    ] = "50ms",
    engine_model: Annotated[
        str, typer.Option(help="8b, 70b, or a JSON file with an engine's constants.")
    ] = "8b",
    cpu_tokens: Annotated[
        int | None, typer.Option(help="KV tokens of each worker's CPU tier.")
    ] = None,
    disk_tokens: Annotated[
        int | None, typer.Option(help="KV tokens of each worker's disk tier.")
    ] = None,
    peer_pull: Annotated[
        str | None, typer.Option(help="Workers fetch KV from each other, at this many GB/s.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="Workers share a store of KV, read at this many GB/s.")
    ] = None,
    store_tokens: Annotated[int, typer.Option(help="KV tokens the store keeps.")] = 4_000_000,
    fail: Annotated[
        list[str] | None, typer.Option(help="TIME:DURATION[:WORKERS] lose all they hold.")
    ] = None,
    scale: Annotated[
        list[str] | None, typer.Option(help="TIME:+WORKERS join, TIME:-WORKERS drain.")
    ] = None,
    slo_ttft: Annotated[str, typer.Option(help="A good answer's first token comes in.")] = "2s",
    slo_tpot: Annotated[str, typer.Option(help="A good answer's mean gap.")] = "50ms",
    slo_capacity: Annotated[
        bool, typer.Option("--slo-capacity", help="Search the load with 90 % good answers.")
    ] = False,
    draws: Annotated[int, typer.Option(help="Jittered repetitions; 0 = as recorded.")] = 0,
    seed: Annotated[int, typer.Option(help="For ties and for who asks which gateway.")] = 0,
    pool: Annotated[str | None, typer.Option(help="Which pool's lines of a log.")] = None,
    check_decisions: Annotated[
        bool, typer.Option("--check-decisions", help="Take a log's decisions again and compare.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw TTFT and goodput over load: FILE.html or FILE.svg.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Play a trace on a simulated fleet and compare routing policies.

    Exits with 0 when it is done, 1 if decisions differ or the trace cannot be played, 2 for
    options that cannot be.
    """
    try:
        if check_decisions:
            raise typer.Exit(_check(trace, as_json=as_json))
        loads = numbers("--load", load)
        if plot is not None:
            _check_plot(plot)
            if len(loads) == 1:
                loads = [loads[0] * factor for factor in PLOT_LOADS]
        setup = Setup(
            _model(engine_model, cpu_tokens, disk_tokens),
            num_workers=_bounded("--workers", workers, 1, 4096),
            load=Load(
                scale=loads[0],
                num_gateways=_bounded("--replicas", replicas, 1, 256),
                share_every_s=load_delay("--load-delay", load_delay_text),
                seed=seed,
                failures=tuple(failure(text, workers) for text in fail or ()),
                scalings=scalings(scale or (), workers),
            ),
            slo=Slo(seconds("--slo-ttft", slo_ttft), seconds("--slo-tpot", slo_tpot)),
            peer_bytes_per_s=number("--peer-pull", peer_pull) * GB if peer_pull else 0.0,
            store_bytes_per_s=number("--store", store) * GB if store else 0.0,
            store_tokens=_bounded("--store-tokens", store_tokens, 512, 1 << 40) if store else 0,
        )
        policies = [name.strip() for name in policy.split(",")]
        for name in policies:
            check_policy(name)
        _bounded("--draws", draws, 0, 1000)
    except (OptionError, PolicyError) as error:
        raise typer.BadParameter(str(error)) from error
    except TraceError as error:
        _fail(error)
    read, setup = _read(trace, pool, setup)
    for note in read.notes:
        print(f"note: {note}", file=sys.stderr)
    if slo_capacity:
        report.print_capacity({n: capacity(read, n, setup) for n in policies}, as_json=as_json)
        return
    seeds = range(1, draws + 1) if draws else (0,)
    jobs = [_Job(n, at, draw) for at in loads for n in policies for draw in seeds]
    summaries = report.merged(_run_all(read, jobs, setup, quiet=as_json))
    if plot is not None:
        report.draw(plot, summaries, read.name)
    if as_json:
        print(json.dumps(report.document(read, setup, draws, summaries), indent=2))
    else:
        report.print_table(summaries)


def _read(path: str, pool: str | None, setup: Setup) -> tuple[Trace, Setup]:
    """Read the trace, and fit the engines' blocks to its grain."""
    try:
        trace = read_trace(path, pool=pool)
        model = msgspec.structs.replace(setup.model, block_tokens=trace.block_tokens)
        check_fits(trace, model, path)
    except ValueError as error:
        _fail(error)
    return trace, msgspec.structs.replace(setup, model=model)


def _model(name: str, cpu_tokens: int | None, disk_tokens: int | None) -> EngineModel:
    try:
        model = load_engine_model(name)
    except ValueError as error:
        raise OptionError(f"--engine-model: {error}") from error
    if cpu_tokens is not None:
        _bounded("--cpu-tokens", cpu_tokens, 0, 1 << 40)
        model = msgspec.structs.replace(model, cpu_tokens=cpu_tokens)
    if disk_tokens is not None:
        _bounded("--disk-tokens", disk_tokens, 0, 1 << 40)
        if disk_tokens and not model.cpu_tokens:
            raise OptionError("--disk-tokens: needs --cpu-tokens above 0: the disk is behind it")
        model = msgspec.structs.replace(model, disk_tokens=disk_tokens)
    return model


def _bounded(option: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise OptionError(f"{option}: must be {least} to {most}, not {value}")
    return value


def _check_plot(path: Path) -> None:
    if path.suffix not in (".html", ".svg"):
        raise OptionError(f"--plot: expected FILE.html or FILE.svg, not {path.name!r}")


def _run_all(trace: Trace, jobs: list[_Job], setup: Setup, *, quiet: bool) -> Iterator[Summary]:
    """Run one after the other; the progress bar stands on stderr, if somebody looks at it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    total = len(trace.requests)
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        for job in jobs:
            task = bar.add_task(f"{job.policy} at {job.load:g}", total=total)

            def progress(done: int, task: Any = task) -> None:
                bar.update(task, completed=done)

            at = setup.at(job.load)
            load = msgspec.structs.replace(
                at.load, jitter=job.draw, seed=setup.load.seed + job.draw
            )
            yield run(trace, job.policy, msgspec.structs.replace(at, load=load), progress)
            bar.remove_task(task)


def _check(path: str, *, as_json: bool) -> int:
    from gateway.replay.decisions import check_decisions

    count, differences = check_decisions(path)
    changed = len({difference.line for difference in differences})
    if as_json:
        rows = [difference._asdict() for difference in differences]
        print(json.dumps({"decisions": count, "different": changed, "differences": rows}, indent=2))
    else:
        for d in differences:
            print(f"{path}:{d.line}: {d.field}: logged {d.logged}, taken again {d.taken}")
        print(f"{count} decisions, {changed} different")
    return 1 if differences else 0


def _fail(error: Exception) -> NoReturn:
    print(f"warmlane: {error}", file=sys.stderr)
    raise typer.Exit(1) from error
