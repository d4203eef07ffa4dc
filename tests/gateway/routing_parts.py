"""Real parts for routing tests: a byte tokenizer, a ChatML template, a pool, a clock to move."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gateway.routing.cost import CostModel
from gateway.routing.dispatch import Dispatcher, Inbound
from gateway.routing.learner import Learner
from gateway.routing.pool import Pool, Worker
from prefix_index.chat import ChatTemplate
from prefix_index.index import Index
from prefix_index.prompts import Prompt, PromptReader
from prefix_index.tokens import PromptTokenizer

BLOCK = 16
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Llama 8B on an H100, as simulated.
H100 = CostModel(3.25e-5, 1.17e-9, 0.004, 5.2e-8)


class Clock:
    """Monotonic seconds that stand still until a test moves them."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def byte_tokenizer() -> PromptTokenizer:
    """One token per byte, so that tests can count."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
    )
    config = {"chat_template": CHATML, "eos_token": "<|im_end|>"}
    return PromptTokenizer.from_parts(json.dumps(json.loads(tokenizer.to_str())), config)


def prompt_reader(block_size: int = BLOCK) -> PromptReader:
    tokenizer = byte_tokenizer()
    template = ChatTemplate(CHATML, special_tokens=tokenizer.special_tokens)
    return PromptReader(tokenizer, template, model="m", block_size=block_size)


def make_pool(
    num_workers: int = 4,
    *,
    model: CostModel | None = H100,
    mode: str = "exact",
    reads: bool = True,
    **options: Any,
) -> Pool:
    workers = [
        Worker(f"w{k}", f"http://127.0.0.1:{9000 + k}", mode=mode, learner=Learner(model))  # type: ignore[arg-type]
        for k in range(num_workers)
    ]
    if reads:
        options |= {"reader": prompt_reader(), "index": Index(BLOCK)}
    options.setdefault("engine", "vllm")
    return Pool("chat", models=["m"], workers=workers, **options)


def let_pull(pool: Pool, style: str = "runner") -> None:
    """Let all workers fetch KV from each other."""
    urls = frozenset(worker.url for worker in pool.workers.values())
    for worker in pool.workers.values():
        worker.can_pull, worker.serves_peers = True, True
        worker.pull_style, worker.pull_peers = style, urls  # type: ignore[assignment]


def dispatcher(pool: Pool, clock: Clock) -> Dispatcher:
    return Dispatcher([pool], clock=clock, seed=1)


def chat(
    text: str, *, system: str = "", headers: dict[str, str] | None = None, **body: Any
) -> Inbound:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    return Inbound(
        "chat",
        {"model": "m", "stream": True, "messages": messages, **body},
        headers or {},
        "m",
        request_id="r1",
    )


def ids(token_ids: list[int], **body: Any) -> Inbound:
    return Inbound(
        "completions", {"model": "m", "stream": True, "prompt": token_ids, **body}, {}, "m"
    )


def hold(pool: Pool, worker_id: str, prompt: Prompt | None) -> None:
    """Let a worker announce that it holds all full blocks of a prompt."""
    assert pool.index is not None
    assert prompt is not None
    pool.index.store(worker_id, prompt.block_hashes, prompt.root)


def is_idle(pool: Pool) -> bool:
    """Whether nothing is booked anywhere."""
    return not len(pool.pending) and all(
        (b.in_flight, b.queued_tokens, b.queued_s, b.context_tokens, b.active_tokens)
        == (0, 0, 0.0, 0, 0)
        for b in (worker.books for worker in pool.workers.values())
    )
