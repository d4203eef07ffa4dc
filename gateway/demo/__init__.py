"""``warmlane demo``: two bundled engines, the gateway, a short real workload and one table.

Starts the same commands a user would, talks to them over HTTP only, and stops them at the end.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from gateway.demo.client import run_workload
from gateway.demo.fleet import MODEL, WORKERS, DemoError, fleet
from gateway.demo.report import document, judge, summary, table

__all__ = ["DemoError", "run"]


def run(*, port: int, once: bool, as_json: bool = False) -> int:
    """Run the demo; return 0, or 1 if a warm request was not the hit it should have been.

    Raises:
        DemoError: If the engines or the gateway do not come up or refuse a request.
    """
    # `kill` and a closed terminal end it as Ctrl-C does: its engines must not outlive it.
    for end in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(end) is not signal.SIG_IGN:  # as under nohup
            signal.signal(end, _interrupt)
    base = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="warmlane-demo-") as folder:
        _say(f"starting {len(WORKERS)} engines and the gateway on port {port} ...")
        with fleet(Path(folder), port) as gateway:
            rows = run_workload(base)
            problems = judge(rows, block_size=16)
            if as_json:
                print(document(rows, problems), flush=True)
            else:
                print(table(rows))
                print(summary(rows, problems), flush=True)
            if once:
                return 1 if problems else 0
            _say(f"serving {base}/v1 (model {MODEL}) until Ctrl-C")
            with contextlib.suppress(KeyboardInterrupt):
                gateway.wait()
    return 0


def _interrupt(_signum: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
