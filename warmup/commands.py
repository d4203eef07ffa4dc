"""What the commands do, once their options are read; each returns its exit code."""

from __future__ import annotations

import json
import sys
import time
import uuid
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from warmup.book import Book
from warmup.drain import wait_for_end
from warmup.gateway_client import SILENCE_S, AwayError, Gateway, RefusedError
from warmup.items import Item, read_items
from warmup.manifest import Manifest, ManifestError, check_url, read_manifest
from warmup.report import (
    plan_json,
    plan_table,
    plan_totals,
    proof_json,
    proof_table,
    proof_totals,
    runs_table,
    will_be_warm,
)
from warmup.run import Ask, GaveUpError, Purpose, Warming
from warmup.talk import JsonLines, Lines, Several, clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from warmup.options import Options
    from warmup.talk import Talk

DEFAULT_GATEWAY = "http://127.0.0.1:8080"
EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_PARTIAL, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


class UsageError(Exception):
    """The manifest or an option cannot be used; the message says why."""


class Session:
    """One command's manifest, gateway and book."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.manifest = None if options.manifest is None else _manifest(options.manifest)
        self.base = _base(options, self.manifest)
        silence_s = min(SILENCE_S, max(options.timeout_s, 1.0))
        self.gateway = Gateway(self.base, options.token, silence_s)
        self.book = Book()
        self.run_id = uuid.uuid4().hex[:12]

    def warming(self, purpose: Purpose, book: Book, talk: Talk) -> Warming:
        """Return a new run of this session's options."""
        options, manifest = self.options, self.manifest
        ask = Ask(
            purpose,
            options.model if manifest is None else manifest.model,
            f"{self.run_id}-{purpose}",
            budget_tokens=None if manifest is None else manifest.budget_tokens,
            concurrency=options.concurrency,
            max_share=options.max_share,
        )
        return Warming(
            self.gateway,
            ask,
            book,
            talk,
            patience_s=options.timeout_s,
            clock=time.monotonic,
            sleep=time.sleep,
            rng=Random(),
        )

    def send(self, warming: Warming) -> None:
        """Send everything that is to be warmed; errors as in :meth:`Warming.warm`."""
        if self.manifest is None:
            assert self.options.live_limit is not None, "one of them is required"
            warming.warm_live(self.options.live_limit)
        else:
            assert self.options.manifest is not None, "it was read from there"
            folder = Path(self.options.manifest).parent
            warming.warm(read_items(self.manifest, folder))

    def warm_items(self) -> Iterator[Item]:
        """Read once more the documents that have proved warm."""
        assert self.manifest is not None, "only manifests have items"
        assert self.options.manifest is not None, "it was read from there"
        for item in read_items(self.manifest, Path(self.options.manifest).parent):
            if isinstance(item, Item) and self.book.is_warm(item.id):
                yield item


def plan(options: Options) -> int:
    """Plan, print, and say whether everything would be warm."""
    return _guarded(options, _plan)


def verify(options: Options) -> int:
    """Prove, print, and say whether everything is warm."""
    return _guarded(options, _verify)


def status(options: Options) -> int:
    """Print the gateway's runs."""
    return _guarded(options, _status)


def run(options: Options) -> int:
    """Warm, prove, print."""
    return _guarded(options, _run)


def _guarded(options: Options, command: Callable[[Session], int]) -> int:
    """Run a command in a session; what ends it early is said on stderr."""
    try:
        session = Session(options)
        try:
            return command(session)
        finally:
            session.gateway.close()
    except UsageError as error:
        for line in str(error).splitlines():
            print(f"warmup: {clean(line)}", file=sys.stderr)
        return EXIT_USAGE
    except (AwayError, GaveUpError, RefusedError) as error:
        print(f"warmup: {clean(str(error))}", file=sys.stderr)
        return EXIT_FAILED


def _plan(session: Session) -> int:
    book, options = session.book, session.options
    session.send(session.warming("plan", book, Lines(sys.stderr, quiet=True)))
    print(json.dumps(plan_json(book), indent=2) if options.as_json else plan_table(book))
    return EXIT_DONE if will_be_warm(book) else EXIT_PARTIAL


def _verify(session: Session) -> int:
    book, options = session.book, session.options
    session.send(session.warming("verify", book, Lines(sys.stderr, quiet=True)))
    if options.as_json:
        print(json.dumps(proof_json(book), indent=2))
    else:
        print(proof_table(book, only_trouble=options.quiet))
    return EXIT_PARTIAL if any(book.not_warm()) else EXIT_DONE


def _status(session: Session) -> int:
    answer = session.gateway.runs()
    as_json = session.options.as_json
    print(json.dumps(answer, indent=2) if as_json else runs_table(answer["runs"]))
    return EXIT_DONE


def _run(session: Session) -> int:
    if not _is_wanted(session):
        return EXIT_DONE
    talk = _talk(session.options)
    warming = session.warming("run", session.book, talk)
    code, failure = EXIT_DONE, None
    try:
        session.send(warming)
        if warming.num_batches > 1:
            talk.say("looking once more: later documents may have pushed out earlier ones")
            warming = session.warming("verify", session.book, talk)
            warming.warm(session.warm_items())
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        _drain(session, warming, talk)
    except (GaveUpError, RefusedError) as error:
        # What is warm is warm all the same, and is said below.
        code, failure = EXIT_FAILED, str(error)
    finally:
        talk.close()
    if failure is not None:
        print(f"warmup: {clean(failure)}", file=sys.stderr)
    return _conclude(session, code)


def _conclude(session: Session, code: int) -> int:
    """Print what a run has come to, and return the exit code."""
    book, options = session.book, session.options
    totals = proof_totals(book)
    if code == EXIT_FAILED and totals["warm"]:
        code = EXIT_PARTIAL
    if code == EXIT_DONE and any(book.not_warm()):
        code = EXIT_PARTIAL
    if options.as_json:
        not_warm = [d for d in proof_json(book)["documents"] if d["state"] != "warm"]
        result = {"event": "result", "exit_code": code, **totals, "not_warm": not_warm}
        print(json.dumps(result), flush=True)
    else:
        print(proof_table(book, only_trouble=True), flush=True)
    return code


def _drain(session: Session, warming: Warming, talk: Talk) -> None:
    """Let what is in flight finish, and take what the gateway tells of it into the book."""
    talk.say("stopping; what is in flight finishes (Ctrl-C again leaves at once)")
    try:
        ended = wait_for_end(
            session.gateway, warming.run_id, clock=time.monotonic, sleep=time.sleep
        )
    except KeyboardInterrupt:
        return
    if ended is None:
        talk.say("the gateway did not say how the run ended")
    else:
        session.book.apply_run(ended.get("documents") or [])


def _is_wanted(session: Session) -> bool:
    """On a terminal, show what it would cost and ask; elsewhere nobody could answer."""
    options = session.options
    if options.yes or options.as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    book = Book()
    session.send(session.warming("plan", book, Lines(sys.stderr, quiet=True)))
    totals = plan_totals(book)
    seconds = "" if totals["seconds"] is None else f", about {totals['seconds']:,.0f} s"
    print(
        f"warmup: {totals['copies']:,} copies of {totals['documents']:,} documents at "
        f"{session.base}: {totals['tokens']:,} tokens to compute{seconds}; "
        f"{totals['held']:,} copies are held already. Go on? [Y/n] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    return sys.stdin.readline().strip().lower() in ("", "y", "yes")


def _talk(options: Options) -> Talk:
    """Return who is told of a run: bars on a terminal, lines in a log, NDJSON for programs."""
    talks: list[Talk] = [JsonLines(sys.stdout)] if options.as_json else []
    if sys.stderr.isatty() and not options.quiet:
        from warmup.bars import Bars

        talks.append(Bars(sys.stderr, no_color=options.no_color))
    else:
        # Programs have it all on stdout.
        talks.append(Lines(sys.stderr, quiet=options.quiet or options.as_json))
    return Several(talks)


def _manifest(path: str) -> Manifest:
    try:
        return read_manifest(Path(path))
    except ManifestError as error:
        raise UsageError(str(error)) from error


def _base(options: Options, manifest: Manifest | None) -> str:
    if options.gateway is None:
        return (manifest.gateway if manifest is not None else None) or DEFAULT_GATEWAY
    try:
        return check_url(options.gateway)
    except ValueError as error:
        raise UsageError(f"--gateway: {error}") from error
