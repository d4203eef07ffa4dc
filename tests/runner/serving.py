"""Serves a service on a real socket inside the test's own event loop."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from runner.detokenizer import TokenTexts
from runner.metrics import RunnerMetrics
from runner.server import HttpServer, bind
from runner.service import ModelFacts, PromptPipeline, Service
from runner.tokenizer import TokenizerFiles, read_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from runner.streams import EngineLike

FACTS = ModelFacts(
    name="smollm2", root="models/smollm2", max_model_len=8192, vocab_size=49_152, block_size=16
)


@cache
def _read(smollm2_dir: Path) -> tuple[TokenizerFiles, PromptPipeline, Tokenizer]:
    # Tokenizers are slow to build and keep nothing of a test but remembered prompts.
    files = read_tokenizer(smollm2_dir)
    return files, PromptPipeline(files, FACTS), Tokenizer.from_str(files.tokenizer_json)


def make_service(engine: EngineLike, smollm2_dir: Path) -> Service:
    files, prompts, detokenizer = _read(smollm2_dir)
    return Service(
        facts=FACTS,
        engine=engine,
        prompts=prompts,
        detokenizer=detokenizer,
        texts=TokenTexts(detokenizer),
        files=files,
        metrics=RunnerMetrics(model=FACTS.name, worker="w", stats=engine.stats),
    )


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[str]:
    """Yield the base URL."""
    bound = bind("127.0.0.1", 0)
    server = HttpServer(service, bound)
    await server.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        await server.stop()
