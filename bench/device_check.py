"""Check a GPU in one run of under 8 minutes: ``python -m bench.device_check``.

One JSON line per stage, on stdout. A stage that fails is a line with its reason and the next one
goes on; after 460 seconds nothing more is begun and what runs is interrupted. Models have random,
seeded weights of an 8B model's shape; the server's is a small one.
``--dry-run`` goes through every stage on a CPU with small sizes, the kernels in Triton's
interpreter: it shows that the script works, and its times mean nothing. ``--only NAME`` runs one
stage. The folder that the disk is measured in is ``DEVICE_CHECK_DIR`` or the system's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.device_parts import Machine

# A lease of 10 minutes leaves as much for starting and fetching.
LIMIT_S = 460.0


class OutOfTimeError(Exception):
    """The run has lasted as long as it may."""


def environment(machine: Machine) -> dict[str, Any]:
    """What is computed with."""
    import torch
    import triton

    facts = {"python": platform.python_version(), "torch": torch.__version__}
    facts |= {"triton": triton.__version__, "device": str(machine.device)}
    if machine.is_dry:
        return facts
    free, total = torch.cuda.mem_get_info()
    return facts | {
        "name": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "cuda": str(torch.version.cuda),
        "free_gib": round(free / 2**30, 1),
        "total_gib": round(total / 2**30, 1),
    }


def stages() -> dict[str, Callable[[Machine], dict[str, Any]]]:
    """Return the stages in order: what everything else rests on first."""
    from bench import device_copies, device_kernels, device_server

    return {
        "environment": environment,
        "kernels": device_kernels.correctness,
        "varlen_attn": device_kernels.varlen_signature,
        "batch_copies": device_copies.batch_copies,
        "decode_rate": device_kernels.decode_rate,
        "prefill_rate": device_kernels.prefill_rate,
        "copies": device_copies.copies,
        "restore": device_copies.restore,
        "decode_step": device_kernels.decode_step,
        "direct_io": device_copies.direct_io,
        "server": device_server.server,
    }


def run_stage(
    name: str, stage: Callable[[Machine], dict[str, Any]], machine: Machine
) -> dict[str, Any]:
    """Return a stage's line; whatever it raises is part of it."""
    import torch

    begun_s = time.monotonic()
    line: dict[str, Any] = {"stage": name, "dry_run": machine.is_dry}
    try:
        with torch.inference_mode():
            line |= {"ok": True} | stage(machine)
    except OutOfTimeError:
        line |= {"ok": False, "reason": f"interrupted after {LIMIT_S:.0f} s of all stages"}
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        line |= {"ok": False, "reason": f"{type(error).__name__}: {error}"}
    line["elapsed_s"] = round(time.monotonic() - begun_s, 2)
    return line


def main(argv: list[str] | None = None) -> int:
    """Run the stages; returns 1 if one failed or was not reached."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with small sizes")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="run this stage; repeatable"
    )
    options = parser.parse_args(argv)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from bench.device_parts import Machine
    from runner.ops.cuda.device import refusal

    if not options.dry_run and (reason := refusal()):
        print(json.dumps({"stage": "environment", "ok": False, "reason": reason}))
        return 1
    machine = Machine(torch.device("cpu" if options.dry_run else "cuda"), options.dry_run)
    known = stages()
    if unknown := set(options.only or ()) - known.keys():
        parser.error(f"no stage is called {min(unknown)}; there are {', '.join(known)}")

    def interrupt(*_: object) -> None:
        raise OutOfTimeError

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    end_s = time.monotonic() + LIMIT_S
    all_ok = True
    for name, stage in known.items():
        if options.only and name not in options.only:
            continue
        if time.monotonic() >= end_s:
            line: dict[str, Any] = {"stage": name, "ok": False, "reason": "no time was left"}
        else:
            line = run_stage(name, stage, machine)
            machine.free()
        all_ok = all_ok and line["ok"]
        print(json.dumps(line), flush=True)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return 0 if all_ok else 1


if __name__ == "__main__":
    sys.exit(main())
