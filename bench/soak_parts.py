"""Parts of the soak: processes to kill and start again, harms to files, a model that is quick."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from pathlib import Path

# A runner drains for up to 30 s; the rest is for a machine that has much else to do.
END_DEADLINE_S = 180.0
# Keys and values in float32: 30 layers of 3 heads of 64.
SMOLLM2_TOKEN_BYTES = 2 * 30 * 3 * 64 * 4
# A hundredth of SmolLM2's work for a token, so that a loaded machine still answers thousands.
RANDOM = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512,
    "max_position_embeddings": 2048, "vocab_size": 49_152, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": True,
}  # fmt: skip
RANDOM_TOKEN_BYTES = 2 * 4 * 4 * 64 * 4


def random_model(tokenizer: Path, folder: Path) -> Path:
    """Write a model of random weights with another one's tokenizer; returns its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**RANDOM))
    with torch.no_grad():
        for parameter in model.parameters():
            # As it is initialised it would continue every prompt alike.
            parameter.mul_(5) if parameter.dim() > 1 else None
    model.save_pretrained(folder)
    for path in tokenizer.glob("tokenizer*.json"):
        shutil.copy(path, folder)
    return folder


@dataclass
class Child:
    """A process that is killed and started again on the same port.

    Attributes:
        kills: How often it was ended; a request that saw one of them may fail.
        is_up: Whether it is ready, as far as we know.
        read_bytes: Of its log, looked through.
    """

    command: list[str]
    log: Path
    port: int
    running: asyncio.subprocess.Process | None = None
    kills: int = 0
    is_up: bool = False
    read_bytes: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        with self.log.open("ab") as out:
            child = await asyncio.create_subprocess_exec(*self.command, stdout=out, stderr=out)
            self.running = child

    async def end(self, number: signal.Signals) -> None:
        if self.running is None:
            return
        child, self.running = self.running, None
        self.kills, self.is_up = self.kills + 1, False
        child.send_signal(signal.SIGCONT)
        child.send_signal(number)
        try:
            await asyncio.wait_for(child.wait(), END_DEADLINE_S)
        except TimeoutError as error:
            child.kill()
            await child.wait()
            raise RuntimeError(
                f"{self.log.stem} did not end within {END_DEADLINE_S:g} s of {number.name}"
            ) from error

    async def stand_still(self, for_s: float) -> None:
        if self.running is None:
            return
        self.running.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(for_s)
        finally:
            self.running.send_signal(signal.SIGCONT)


async def no_growth(runner: Child, max_bytes: int, for_s: float) -> None:
    """Let a runner's writes fail: its files may not reach beyond a few bytes."""
    if runner.running is None:
        return
    pid = runner.running.pid
    unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (max_bytes, unlimited[1]))
    await asyncio.sleep(for_s)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)


def damage(disk: Path, rng: random.Random) -> None:
    """Overwrite a few pieces of segment files, or cut one short."""
    files = [path for path in disk.rglob("*") if path.is_file() and path.stat().st_size > 65536]
    for path in rng.sample(files, min(2, len(files))):
        size = path.stat().st_size
        if rng.random() < 0.2:
            os.truncate(path, rng.randrange(size))
            continue
        with path.open("r+b") as file:
            for _ in range(20):
                file.seek(rng.randrange(size))
                file.write(rng.randbytes(3))
