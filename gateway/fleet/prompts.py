"""How a pool comes to read prompts: from configured files, or from what a bundled runner hands out.

A pool reads prompts once its tokenizer and its block size are known; until then it routes by text.
Its block size is the configured one, or the smallest that its workers report as they start: those
of larger ones are read in parts. One that comes later with smaller blocks is routed by text.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import structlog

from gateway.routing.pool import DEFAULT_BLOCK_SIZE
from gateway.settings import ConfigError
from gateway.upstream.client import UpstreamError
from prefix_index.chat import ChatTemplate, TemplateRefusedError
from prefix_index.index import Index
from prefix_index.prompts import PromptReader
from prefix_index.tokens import PromptTokenizer, TokenizerFilesError

if TYPE_CHECKING:
    from gateway.config import PoolConfig
    from gateway.routing.pool import Pool
    from gateway.upstream.client import Upstream

log = structlog.get_logger("warmlane")

# A tokenizer is a few megabytes of JSON that a loaded engine hands out between two steps.
HAND_OUT_DEADLINE_S = 30.0
# How long the first worker's block size waits for the others': they are all asked when the gateway
# starts, and answer within milliseconds or hang.
OTHERS_DEADLINE_S = 1.0


class PoolPrompts:
    """Collects what one pool needs to read prompts; used from the event loop only.

    Args:
        pool: Gets its reader and index from here.
        config: Its configuration.
        max_blocks: Bound of its index.

    Raises:
        ConfigError: If the configured tokenizer or template cannot be used.
    """

    def __init__(self, pool: Pool, config: PoolConfig, *, max_blocks: int) -> None:
        self._pool = pool
        self._config = config
        self._max_blocks = max_blocks
        self._tokenizer: PromptTokenizer | None = None
        self._block_size = config.block_size if isinstance(config.block_size, int) else None
        if self._block_size is None and config.engine == "openai":
            # Nobody will tell; any size finds shared prefixes in what we routed ourselves.
            self._block_size = DEFAULT_BLOCK_SIZE
        # Set when every worker has told its block size.
        self._all_told = asyncio.Event()
        self._template = _read_template(config)
        if config.tokenizer is not None:
            self._tokenizer = _read_tokenizer(config)
        self._complete()

    @property
    def is_wanted(self) -> bool:
        """Whether something is still missing that a worker may tell."""
        can_learn = self._config.tokenizer is not None or self._config.engine == "runner"
        return self._pool.reader is None and can_learn

    async def learn(self, upstream: Upstream, block_size: int | None) -> None:
        """Take from a healthy worker what is missing; what it does not tell stays missing.

        Args:
            upstream: The worker's connections.
            block_size: Its block size, if it reports one.
        """
        if self._block_size is None and block_size is not None:
            self._block_size = await self._smallest(block_size)
        if self._tokenizer is None and self._config.engine == "runner":
            handed_out = await _hand_out(upstream)
            if handed_out is not None:
                self._tokenizer = handed_out
        self._complete()

    async def _smallest(self, block_size: int) -> int:
        """Return the smallest of the workers' block sizes, those told within a moment included."""
        workers = self._pool.workers.values()
        if all(w.block_size or not w.health.ready for w in workers):
            self._all_told.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OTHERS_DEADLINE_S):
                await self._all_told.wait()
        return min([block_size, *(w.block_size for w in workers if w.block_size)])

    def _complete(self) -> None:
        if self._pool.reader is not None or self._tokenizer is None or self._block_size is None:
            return
        source = self._template or self._tokenizer.template_source
        template = None
        if source is not None:
            try:
                template = ChatTemplate(
                    source,
                    special_tokens=self._tokenizer.special_tokens,
                    timezone=self._config.timezone,
                )
            except (TemplateRefusedError, KeyError, OSError) as error:
                where = f"pools[{self._config.name}].template"
                raise ConfigError(f"{where}: cannot be used: {error}") from error
            if template.prints_date:
                log.warning(
                    "template_prints_date",
                    pool=self._config.name,
                    template=self._config.template or "the tokenizer's own",
                    timezone=self._config.timezone,
                    effect="every prefix is new after midnight in that zone; pools[].timezone "
                    "must be the engine's",
                )
        reader = PromptReader(
            self._tokenizer,
            template,
            model=self._pool.models[0],
            block_size=self._block_size,
            engine=self._config.engine,
        )
        self._pool.use_prompts(reader, Index(self._block_size, self._max_blocks))


def _read_tokenizer(config: PoolConfig) -> PromptTokenizer:
    try:
        return PromptTokenizer.from_dir(Path(config.tokenizer or ""))
    except TokenizerFilesError as error:
        raise ConfigError(f"pools[{config.name}].tokenizer: {error}") from error


def _read_template(config: PoolConfig) -> str | None:
    if config.template is None:
        return None
    try:
        return Path(config.template).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"pools[{config.name}].template: cannot be read: {error}") from error


async def _hand_out(upstream: Upstream) -> PromptTokenizer | None:
    """Ask a bundled runner for its tokenizer; None if it has none to give right now."""
    try:
        response = await upstream.request(
            "GET", "/tokenizer", [], first_byte_s=HAND_OUT_DEADLINE_S, total_s=HAND_OUT_DEADLINE_S
        )
        try:
            body = await response.read()
        finally:
            response.close()
        if response.status != 200:
            return None
        files: dict[str, Any] = orjson.loads(body)
        config = {**files["tokenizer_config"], "chat_template": files["chat_template"]}
        return PromptTokenizer.from_parts(files["tokenizer_json"], config)
    except (UpstreamError, TokenizerFilesError, orjson.JSONDecodeError, KeyError, TypeError):
        return None
