"""One progress bar per worker on a terminal, with tokens and the time that is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from warmup.events import Plan, Step
from warmup.talk import clean, describe

if TYPE_CHECKING:
    from typing import TextIO

    from rich.progress import TaskID

    from warmup.documents import Problem
    from warmup.events import Event


class Bars:
    """Draws on ``out``; trouble is printed above the bars.

    Args:
        out: A terminal.
        no_color: Draw without colours; NO_COLOR says the same.
    """

    def __init__(self, out: TextIO, *, no_color: bool) -> None:
        # None leaves NO_COLOR to rich.
        console = Console(file=out, no_color=True if no_color else None)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens", markup=False),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        # Tokens of the copies that are planned or under way, by (document, worker).
        self._planned: dict[tuple[str, str], int] = {}
        self._sent: dict[tuple[str, str], int] = {}
        self._progress.start()

    def event(self, event: Event, line: bytes) -> None:
        """Move the bars."""
        del line
        if isinstance(event, Plan):
            self._plan(event)
        elif isinstance(event, Step) and event.worker is not None:
            self._step(event, event.worker)
        if isinstance(event, Step) and event.event == "failed":
            self.say(describe(event) or "")

    def problem(self, problem: Problem) -> None:
        """Print it above the bars."""
        self.say(f"cannot warm {problem.id}: {problem.reason}")

    def away(self, reason: str, wait_s: float) -> None:
        """Print it above the bars."""
        self.say(f"{reason}; trying again in {wait_s:.1f} s")

    def say(self, text: str) -> None:
        """Print it above the bars, as text and not as markup."""
        self._progress.console.print(Text(f"warmup: {clean(text)}"))

    def close(self) -> None:
        """Take the bars away."""
        self._progress.stop()

    def totals(self) -> dict[str, tuple[float, float]]:
        """Return (tokens done, tokens in all) of each worker's bar."""
        tasks = {task.description: task for task in self._progress.tasks}
        return {name: (task.completed, task.total or 0.0) for name, task in tasks.items()}

    def _plan(self, plan: Plan) -> None:
        """Add what is new; what an earlier plan promised and did not begin is taken back."""
        for (_, worker), tokens in self._planned.items():
            self._add(worker, total=-tokens)
        for (_, worker), tokens in self._sent.items():
            self._add(worker, completed=-tokens)
        self._sent.clear()
        self._planned = {
            (p.id, p.worker): p.tokens
            for p in plan.placements
            if p.action == "warm" and p.worker is not None
        }
        for (_, worker), tokens in self._planned.items():
            self._add(worker, total=tokens)

    def _step(self, step: Step, worker: str) -> None:
        key = (step.id, worker)
        if key not in self._planned:
            return
        is_over = step.event in ("done", "failed")
        tokens = self._planned[key]
        sent = tokens if is_over else min(tokens, step.tokens or 0)
        if step.event == "start":
            sent = 0
        self._add(worker, completed=sent - self._sent.get(key, 0))
        self._sent[key] = sent
        if is_over:
            del self._planned[key], self._sent[key]

    def _add(self, worker: str, **by: Any) -> None:
        if worker not in self._tasks:
            self._tasks[worker] = self._progress.add_task(clean(worker), total=0)
        task = self._progress.tasks[self._tasks[worker]]
        if "total" in by:
            self._progress.update(task.id, total=(task.total or 0) + by["total"])
        if "completed" in by:
            self._progress.update(task.id, advance=by["completed"])
