"""The command ``warmlane runner`` (``python -m runner``)."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

from runner.config import ConfigError, RunnerConfig, parse_args

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.serve import Runner

# Exit codes of the project's commands.
EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

# The contract's default of `server.drain_s`.
DRAIN_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code."""
    config = parse_args(argv)
    try:
        return _run(config)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(config: RunnerConfig) -> int:
    # Not above: `--help` and usage errors need none of these, and they take a while to import.
    from runner.logs import configure
    from runner.serve import StartError, load

    configure(config.log_level)
    try:
        runner = load(config)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return asyncio.run(_serve(runner, config))


async def _serve(runner: Runner, config: RunnerConfig) -> int:
    import structlog

    log = structlog.get_logger("runner")
    received: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received.put_nowait, number)
    await runner.start()
    facts = runner.service.facts
    log.info(
        "ready",
        url=runner.url,
        port=runner.port,
        model=facts.name,
        dtype=config.dtype,
        max_model_len=facts.max_model_len,
        kv_events=runner.publisher and runner.publisher.endpoint,
        kv_replay=runner.publisher and runner.publisher.replay_endpoint,
    )
    first = await received.get()
    log.info("draining", signal=first.name)
    drain = asyncio.create_task(runner.drain(DRAIN_S))
    impatient = asyncio.create_task(received.get())
    # A second signal means: now.
    await asyncio.wait({drain, impatient}, return_when=asyncio.FIRST_COMPLETED)
    for task in (drain, impatient):
        task.cancel()
    await runner.stop()
    return EXIT_INTERRUPTED if first is signal.SIGINT else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
