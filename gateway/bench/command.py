"""``warmlane bench``: sends questions about documents and says what came of them."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

from gateway.bench.client import Target, measure, served_models
from gateway.bench.report import document, table
from gateway.bench.workload import workload

# "Partial": some requests failed.
EXIT_DONE, EXIT_FAILED, EXIT_PARTIAL = 0, 1, 3


class ModelNeededError(ValueError):
    """The server has several models, or not the one that was asked for; the message lists them."""


def run(
    base: str,
    model: str | None,
    key: str | None,
    *,
    num_requests: int,
    num_documents: int,
    num_words: int,
    concurrency: int,
    max_tokens: int,
    seed: int | None,
    as_json: bool,
) -> int:
    """Run it and print what was found; return the exit code.

    Raises:
        ConnectionError: If the server does not say which models it has.
        ModelNeededError: If none was named and there are several.
    """
    target = Target(base, model or _only_model(served_models(base, key)), key)
    # Documents that no earlier run has left in a cache, unless it is asked for.
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    asks = workload(
        seed, num_requests=num_requests, num_documents=num_documents, num_words=num_words
    )
    _say(f"{base}: {num_requests} requests of {concurrency} clients, seed {seed}")
    start_s = time.monotonic()
    answers = asyncio.run(
        measure(
            target,
            asks,
            concurrency=concurrency,
            max_tokens=max_tokens,
            done=lambda count: _progress(count, num_requests),
        )
    )
    found = document(answers, time.monotonic() - start_s)
    run_by = {"url": base, "model": target.model, "seed": seed, "concurrency": concurrency}
    print(json.dumps(run_by | found, indent=2) if as_json else table(found))
    failed = found["all"]["failed"]
    if failed == num_requests:
        return EXIT_FAILED
    return EXIT_PARTIAL if failed else EXIT_DONE


def _only_model(models: list[str]) -> str:
    if len(models) == 1:
        return models[0]
    raise ModelNeededError(f"name one of the models with --model: {', '.join(models) or 'none'}")


def _progress(count: int, num_requests: int) -> None:
    # About ten lines, however many requests.
    step = max(1, num_requests // 10)
    if count % step == 0 and count < num_requests:
        _say(f"{count} of {num_requests}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
