"""The routing tables behind the design, run again with the product's own code.

Eight scenarios on four traces, 16 workers, moderate and high load; every policy of ``replay``. Each
finished run is one line of ``--out``; what is there already is not run again, so that a run of
hours may be stopped and gone on with.

    python -m bench.routing run --traces DIR --out FILE --scenario code8,conv8 --policy ours,llmd
    python -m bench.routing run ... --group kvmove      # peers' KV at several bandwidths
    python -m bench.routing run ... --group gateways    # several gateways, load shared or not
    python -m bench.routing run ... --group capacity
    python -m bench.routing report --out FILE

Columns of the report: mean TTFT s / p95 s / joint goodput, and in brackets the mean TTFT against
the published simulation (``PUBLISHED``: reference of the design, section 3).
"""

from __future__ import annotations

import argparse
import json
import time
from functools import cache
from math import exp, inf, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from gateway.replay.presets import PRESETS
from gateway.replay.runs import Setup, capacity, run
from gateway.replay.simulate import Load
from gateway.replay.summary import Slo
from gateway.replay.traces import Trace, read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACES = {
    "conv": "mooncake_conversation",
    "tool": "toolagent_mix_STANDIN",
    "synth": "mooncake_synthetic",
    "code": "claude_code_agentic",
}
SLOS = {"8b": Slo(2.0, 0.050), "70b": Slo(5.0, 0.100)}
AGENTIC = ("code8", "code8g", "code70")
# The six scenarios that transfers were simulated on.
KVMOVE = ("conv8", "tool8", "synth8", *AGENTIC)
GB = 1e9


class Scenario(NamedTuple):
    trace: str
    preset: str
    cpu_tokens: int
    moderate: float
    high: float


SCENARIOS = {
    "conv8": Scenario("conv", "8b", 0, 2.6, 3.9),
    "tool8": Scenario("tool", "8b", 0, 2.8, 4.2),
    "synth8": Scenario("synth", "8b", 0, 2.2, 3.4),
    "code8": Scenario("code", "8b", 1_600_000, 0.4, 0.65),
    "code8g": Scenario("code", "8b", 0, 0.2, 0.28),
    "conv70": Scenario("conv", "70b", 1_200_000, 2.0, 3.0),
    "tool70": Scenario("tool", "70b", 1_200_000, 2.0, 3.0),
    "code70": Scenario("code", "70b", 1_200_000, 0.3, 0.5),
}

# Mean TTFT s / joint goodput per scenario in the order above, as published.
PUBLISHED = {
    "moderate": {
        "random": "1.51/.77 1.58/.73 2.55/.60 20.3/.15 8.43/.15 4.33/.69 4.25/.66 50.0/.12",
        "round_robin": "1.11/.84 1.50/.80 1.84/.74 12.5/.26 4.94/.27 3.07/.78 3.98/.73 36.1/.22",
        "least_requests": ".76/.91 .49/.92 1.05/.80 5.53/.27 4.93/.28 1.68/.9 1.05/.91 16.8/.19",
        "power_of_two": "1.03/.86 .76/.86 1.46/.72 8.51/.20 5.83/.22 2.52/.82 1.84/.83 23.8/.15",
        "least_queued_tokens": ".60/.93 .35/.94 .83/.83 5.18/.24 4.92/.24 1.16/.93 .66/.93 16.5/.2",
        "session_hash": "1.20/.82 1.35/.79 .87/.85 .80/.92 1.05/.90 2.40/.84 2.34/.82 1.03/.95",
        "chwbl": ".85/.88 .59/.90 .89/.84 1.30/.82 2.08/.70 1.80/.89 1.20/.90 2.12/.86",
        "sglang": ".82/.89 .70/.90 .67/.90 .95/.91 8.88/.81 1.55/.92 1.35/.91 1.16/.94",
        "sglang_zmq": ".79/.90 .69/.90 .61/.90 .49/.95 .69/.93 1.46/.92 1.29/.92 .74/.97",
        "aibrix": ".72/.91 .47/.94 .66/.90 .79/.90 1.00/.87 1.35/.93 .89/.95 1.26/.92",
        "llmd": ".59/.92 .45/.93 .50/.93 .46/.96 .47/.95 1.15/.93 .88/.93 .71/.97",
        "dynamo": ".55/.93 .33/.88 .52/.93 1.71/.74 1.14/.84 1.11/.93 .69/.84 3.37/.75",
        "lmetric": ".72/.91 .52/.93 .61/.90 .48/.96 .56/.94 1.37/.93 1.02/.94 .73/.97",
        "lmetric_events": ".70/.91 .52/.93 .53/.92 .47/.96 .44/.95 1.34/.93 1.01/.94 .74/.97",
        "mooncake": ".51/.94 .29/.96 .45/.93 .54/.95 .51/.94 .88/.96 .50/.96 .92/.96",
        "ours": ".50/.95 .28/.97 .44/.94 .44/.96 .39/.96 .88/.97 .50/.98 .67/.97",
        "oracle": ".48/.95 .26/.96 .38/.95 .31/.98 .31/.98 .79/.97 .44/.97 .50/.98",
    },
    "high": {
        "random": "4.44/.52 15.9/.26 5.64/.41 41.7/.09 15.5/.10 35.1/.15 53.1/.10 89.7/.08",
        "round_robin": "3.38/.60 17.9/.31 4.01/.51 34.1/.14 7.36/.19 29.2/.22 55.2/.11 78.7/.14",
        "least_requests": ".93/.82 .76/.67 1.67/.57 22.1/.10 5.81/.2 7.91/.29 28.9/.02 58/.07",
        "power_of_two": "1.55/.71 1.65/.54 2.76/.47 25.3/.09 7.18/.15 10.3/.21 30.7/.02 62.2/.06",
        "least_queued_tokens": ".61/.83 .40/.63 1.08/.58 22.8/.1 5.29/.18 3.30/.33 26.7/0 60/.07",
        "session_hash": "2.93/.64 11.6/.48 3.23/.73 1.76/.84 3.93/.77 7.60/.60 12.9/.54 3.08/.86",
        "chwbl": "1.26/.77 1.00/.74 1.33/.70 2.13/.72 2.58/.63 3.25/.71 2.93/.68 4.41/.71",
        "sglang": "1.06/.83 1.05/.80 .71/.87 2.07/.83 14.1/.77 2.05/.86 1.97/.84 20.6/.83",
        "sglang_zmq": ".99/.85 1.03/.81 .71/.87 1.02/.90 1.01/.88 1.95/.87 1.84/.85 1.47/.92",
        "aibrix": ".89/.86 .63/.86 .84/.84 1.11/.85 1.38/.80 1.78/.87 1.28/.86 2.04/.87",
        "llmd": ".69/.87 .59/.85 .62/.89 .75/.92 .66/.91 1.47/.87 1.16/.85 1.12/.94",
        "dynamo": ".62/.86 .43/.68 .63/.85 4.48/.42 2.12/.67 1.33/.79 .97/.59 19.5/.30",
        "lmetric": ".93/.85 .77/.85 .91/.86 .93/.90 .85/.90 1.74/.88 1.50/.87 1.32/.93",
        "lmetric_events": ".85/.87 .71/.87 .73/.89 .87/.91 .65/.92 1.75/.88 1.45/.88 1.40/.93",
        "mooncake": ".53/.89 .31/.86 .52/.90 1.31/.87 .70/.90 .98/.89 .62/.84 1.40/.92",
        "ours": ".52/.94 .30/.94 .47/.93 .64/.93 .59/.92 .96/.93 .56/.93 1.00/.95",
        "oracle": ".48/.93 .27/.91 .39/.94 .31/.98 .37/.97 .79/.95 .45/.92 .50/.98",
    },
}  # fmt: skip
# Largest load with 90 % goodput: ours in the published simulation.
PUBLISHED_CAPACITY = [4.65, 4.65, 4.31, 0.81, 0.32, 3.22, 3.14, 0.63]


class Case(NamedTuple):
    """One run: what makes its line unique."""

    kind: str
    scenario: str
    policy: str
    load: float
    draw: int
    gateways: int = 1
    share_every_s: float | None = None
    peer_gb_s: float = 0.0


def cases(args: argparse.Namespace) -> Iterator[Case]:
    chosen = args.scenario.split(",") if args.scenario else list(SCENARIOS)
    for draw in range(args.first_draw, args.first_draw + args.draws):
        for policy in args.policy.split(","):
            for name in chosen:
                scenario = SCENARIOS[name]
                load = scenario.high if args.level == "high" else scenario.moderate
                yield from grouped(args.group, name, policy, load, draw)


def grouped(group: str, name: str, policy: str, load: float, draw: int) -> Iterator[Case]:
    if group == "table":
        yield Case("run", name, policy, load, draw)
    elif group == "capacity":
        yield Case("capacity", name, policy, load, draw)
    elif group == "kvmove" and name in KVMOVE:
        for gb_s in (0.0, 1.0, 12.5):
            yield Case("run", name, policy, load, draw, peer_gb_s=gb_s)
    elif group == "gateways":
        yield Case("run", name, policy, load, draw)
        for gateways in (4, 16):
            for share_every_s in (0.05, 0.5, None):
                yield Case("gateways", name, policy, load, draw, gateways, share_every_s)


@cache
def trace_of(folder: str, name: str) -> Trace:
    return read_trace(str(Path(folder) / f"{TRACES[name]}.jsonl.gz"))


def setup_of(case: Case) -> Setup:
    scenario = SCENARIOS[case.scenario]
    model = PRESETS[scenario.preset]
    return Setup(
        msgspec.structs.replace(model, cpu_tokens=scenario.cpu_tokens),
        load=Load(
            scale=case.load,
            num_gateways=case.gateways,
            share_every_s=inf if case.share_every_s is None else case.share_every_s,
            seed=case.draw,
            jitter=case.draw,
        ),
        slo=SLOS[scenario.preset],
        peer_bytes_per_s=case.peer_gb_s * GB,
    )


def run_cases(args: argparse.Namespace) -> None:
    done = {case for case, _ in results(args.out)}
    for case in cases(args):
        if case in done:
            continue
        done.add(case)
        trace = trace_of(args.traces, SCENARIOS[case.scenario].trace)
        start_s = time.perf_counter()
        result: Any
        if case.kind == "capacity":
            result = capacity(trace, case.policy, setup_of(case))
        else:
            result = run(trace, case.policy, setup_of(case))
        line = {
            "case": case._asdict(),
            "result": msgspec.to_builtins(result),
            "wall_s": round(time.perf_counter() - start_s, 2),
        }
        with open(args.out, "a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def results(path: str) -> list[tuple[Case, Any]]:
    """Return what is there; of a case that was run twice, the later."""
    if not Path(path).exists():
        return []
    lines = map(json.loads, Path(path).read_text().splitlines())
    return list({Case(**line["case"]): line["result"] for line in lines}.items())


def geo_mean(values: list[float]) -> float:
    return exp(sum(map(log, values)) / len(values)) if values else float("nan")


def report(args: argparse.Namespace) -> None:
    found = results(args.out)
    for level in ("moderate", "high"):
        print(f"\n## {level} load: mean TTFT s / p95 s / goodput (mean TTFT against published)")
        print("| policy | " + " | ".join(SCENARIOS) + " | geo-mean against published | draws |")
        policies = dict.fromkeys(c.policy for c, _ in found if c.kind == "run" and not c.peer_gb_s)
        for policy in policies:
            row(found, policy, level)
    report_kvmove(found)
    report_gateways(found)
    report_capacity(found)


def mean_of(found: list[tuple[Case, Any]], **wanted: Any) -> tuple[dict[str, float], int]:
    """Return the mean of each number over the draws of one cell, and how many there are."""
    same = [
        result
        for case, result in found
        if all(getattr(case, key) == value for key, value in wanted.items())
    ]
    if not same:
        return {}, 0
    numbers = [key for key, value in same[0].items() if isinstance(value, int | float)]
    return {key: sum(r[key] for r in same) / len(same) for key in numbers}, len(same)


def row(found: list[tuple[Case, Any]], policy: str, level: str) -> None:
    published = PUBLISHED[level].get(policy, "").split()
    cells, ratios, draws = [], [], 0
    for i, (name, scenario) in enumerate(SCENARIOS.items()):
        load = scenario.high if level == "high" else scenario.moderate
        wanted = {"kind": "run", "scenario": name, "policy": policy, "load": load, "peer_gb_s": 0.0}
        mean, count = mean_of(found, **wanted)
        draws = max(draws, count)
        if not mean:
            cells.append("-")
            continue
        cell = f"{mean['ttft_mean_s']:.3f} / {mean['ttft_p95_s']:.2f} / {mean['goodput']:.3f}"
        if published:
            ratio = mean["ttft_mean_s"] / float(published[i].split("/")[0])
            ratios.append(ratio)
            cell += f" ({ratio:.2f})"
        cells.append(cell)
    if any(cell != "-" for cell in cells):
        print(f"| {policy} | " + " | ".join(cells) + f" | {geo_mean(ratios):.3f} | {draws} |")


def report_kvmove(found: list[tuple[Case, Any]]) -> None:
    rates = sorted({c.peer_gb_s for c, _ in found if c.peer_gb_s})
    if rates:
        print("\n## peer pull, high load: mean TTFT against ours without, same draws")
    for gb_s in rates:
        wanted, base = ({"kind": "run", "peer_gb_s": rate} for rate in (gb_s, 0.0))
        ratios = paired(found, wanted, base, list(KVMOVE))
        print_ratios(f"{gb_s:g} GB/s", ratios)


def report_gateways(found: list[tuple[Case, Any]]) -> None:
    kinds = sorted({(c.gateways, c.share_every_s or inf) for c, _ in found if c.kind == "gateways"})
    if kinds:
        print("\n## several gateways: mean TTFT against one, same draws")
    for gateways, every_s in kinds:
        share = None if every_s == inf else every_s
        wanted = {"kind": "gateways", "gateways": gateways, "share_every_s": share}
        ratios = paired(found, wanted, {"kind": "run", "peer_gb_s": 0.0}, list(SCENARIOS))
        label = "unshared" if share is None else f"{1000 * share:.0f} ms"
        print_ratios(f"{gateways} gateways, {label}", ratios)


def paired(
    found: list[tuple[Case, Any]], wanted: dict[str, Any], base: dict[str, Any], names: list[str]
) -> dict[str, float]:
    """Return scenario -> mean TTFT of ours over that of the base, over the draws both have."""
    ratios = {}
    for name in names:
        common = {"scenario": name, "policy": "ours", "load": SCENARIOS[name].high}
        draws = {c.draw for c, _ in found if matches(c, common | wanted)}
        draws &= {c.draw for c, _ in found if matches(c, common | base)}
        if draws:
            values = [
                sum(
                    r["ttft_mean_s"]
                    for c, r in found
                    if matches(c, common | which) and c.draw in draws
                )
                for which in (wanted, base)
            ]
            ratios[name] = values[0] / values[1]
    return ratios


def matches(case: Case, wanted: dict[str, Any]) -> bool:
    return all(getattr(case, key) == value for key, value in wanted.items())


def print_ratios(label: str, ratios: dict[str, float]) -> None:
    agentic = [ratio for name, ratio in ratios.items() if name in AGENTIC]
    cells = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    means = f"all {geo_mean(list(ratios.values())):.3f}, agentic {geo_mean(agentic):.3f}"
    print(f"{label}: {means} ({cells})")


def report_capacity(found: list[tuple[Case, Any]]) -> None:
    rows = [(c, r) for c, r in found if c.kind == "capacity"]
    if rows:
        print("\n## capacity: largest load with 90 % goodput (ours: against published)")
    for policy in dict.fromkeys(c.policy for c, _ in rows):
        cells, ratios = [], []
        for name, published in zip(SCENARIOS, PUBLISHED_CAPACITY, strict=True):
            values = [r for c, r in rows if c.policy == policy and c.scenario == name and r]
            if values:
                mean = sum(values) / len(values)
                ratios.append(mean / published)
                cells.append(f"{name} {mean:.2f} ({mean / published:.2f})")
        print(f"{policy}: geo-mean {geo_mean(ratios):.3f}; {', '.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["run", "report"])
    parser.add_argument("--out", required=True, help="results, one JSON line a run")
    parser.add_argument("--traces", default=".", help="folder with the four compact traces")
    parser.add_argument("--scenario", default="", help="comma-separated; default: all eight")
    parser.add_argument("--policy", default="ours", help="comma-separated")
    parser.add_argument("--level", choices=["moderate", "high"], default="high")
    parser.add_argument(
        "--group", choices=["table", "capacity", "kvmove", "gateways"], default="table"
    )
    parser.add_argument("--draws", type=int, default=3, help="jittered draws")
    parser.add_argument("--first-draw", type=int, default=1, help="0 = as recorded")
    args = parser.parse_args()
    (run_cases if args.command == "run" else report)(args)


if __name__ == "__main__":
    main()
