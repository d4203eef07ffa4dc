"""One runner process put together: files, model, engine, event publisher, HTTP server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from tokenizers import Tokenizer

from runner.config import DEFAULT_MODEL, ConfigError, RunnerConfig, pool_tokens
from runner.detokenizer import TokenTexts
from runner.engine import Engine
from runner.fetch import is_complete, missing_weights_message, models_dir
from runner.metrics import RunnerMetrics
from runner.publisher import EventPublisher
from runner.server import HttpServer, bind
from runner.service import ModelFacts, PromptPipeline, Service
from runner.tokenizer import read_tokenizer
from runner.types import EngineConfig
from runner.weights import load_model

if TYPE_CHECKING:
    import socket

    from runner.model import Model

# Requests that outlive the drain have had their chance; the engine only finishes its step.
ENGINE_STOP_TIMEOUT_S = 5.0

log = structlog.get_logger(__name__)


class ModelMissingError(RuntimeError):
    """There is no model at the given place; the message says how to get one."""


@dataclass(slots=True)
class Runner:
    """A loaded runner. ``start``, ``drain`` and ``stop`` belong to one event loop."""

    url: str
    engine: Engine
    service: Service
    server: HttpServer
    publisher: EventPublisher | None

    async def start(self) -> None:
        """Begin to serve."""
        self.engine.start()
        if self.publisher is not None:
            self.publisher.start()
        await self.server.start()

    async def drain(self, timeout_s: float) -> None:
        """Finish what is in flight, refuse the rest."""
        await self.server.drain(timeout_s)

    async def stop(self) -> None:
        """Close everything; the runner cannot be started again."""
        await self.server.stop()
        self.engine.stop(ENGINE_STOP_TIMEOUT_S)
        if self.publisher is not None:
            self.publisher.close()


def load(config: RunnerConfig) -> Runner:
    """Take the ports and load the model; nothing is served yet.

    Raises:
        ModelMissingError: If there is no model at ``config.model``.
        ConfigError: If a size does not fit the model.
        OSError, PublisherError: If an address cannot be taken.
        WeightsError, UnsupportedModelError, TokenizerError, GgufError: If its files are unusable.
    """
    path = model_path(config.model)
    bound = bind(config.host, config.port)
    publisher = None
    try:
        if config.kv_events is not None:
            topic = f"kv@{config.name}"
            publisher = EventPublisher(config.kv_events, config.kv_replay, topic=topic)
        return _assemble(config, path, bound, publisher)
    except BaseException:
        bound.close()
        if publisher is not None:
            publisher.close()
        raise


def model_path(model: str) -> Path:
    """Return where the model's files are.

    Raises:
        ModelMissingError: If they are not there.
    """
    if model == DEFAULT_MODEL:
        folder = models_dir() / DEFAULT_MODEL
        if not is_complete(folder):
            raise ModelMissingError(missing_weights_message(folder))
        return folder
    path = Path(model)
    if not path.exists():
        raise ModelMissingError(f"no model at {path}: neither a folder nor a .gguf file")
    return path


def _assemble(
    config: RunnerConfig, path: Path, bound: socket.socket, publisher: EventPublisher | None
) -> Runner:
    files = read_tokenizer(path)
    model = load_model(path, config.dtype, config.threads)
    tokens, max_model_len = _limits(config, model)
    sizes = EngineConfig(
        block_size=config.block_size, pool_tokens=tokens, max_model_len=max_model_len
    )
    engine = Engine(model, sizes, publisher.publish if publisher is not None else None)
    facts = ModelFacts(
        name=config.name,
        root=str(path),
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
        block_size=config.block_size,
    )
    host, port = bound.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    detokenizer = Tokenizer.from_str(files.tokenizer_json)
    service = Service(
        facts=facts,
        engine=engine,
        prompts=PromptPipeline(files, facts),
        detokenizer=detokenizer,
        texts=TokenTexts(detokenizer),
        files=files,
        metrics=RunnerMetrics(model=facts.name, worker=address, stats=engine.stats),
        publisher=publisher,
    )
    return Runner(f"http://{address}", engine, service, HttpServer(service, bound), publisher)


def _limits(config: RunnerConfig, model: Model) -> tuple[int, int]:
    """Return the pool's capacity and the longest request, both in tokens."""
    sizes = model.config
    # Keys and values of every layer.
    token_bytes = 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * model.dtype.itemsize
    tokens = pool_tokens(config.pool, token_bytes, config.block_size)
    longest = min(sizes.context_tokens, tokens)
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is above what the model "
            f"({sizes.context_tokens} tokens) and the KV pool ({tokens} tokens) allow"
        )
    return tokens, config.max_model_len or longest
