"""The stage of ``device_check.py`` that starts a whole runner and asks it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.device_parts import LARGE
from runner.arch import tensor_shapes

if TYPE_CHECKING:
    from bench.device_parts import Machine

ROOT = Path(__file__).resolve().parent.parent

START_S = 60.0
ANSWER_S = 60.0
NUM_TOKENS = 24
TEXT = "A prefix cache keeps the keys and values of tokens it has seen. "
END = 256
MODEL = replace(
    LARGE,
    vocab_size=END + 1,
    hidden_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    ffn_size=1024,
    context_tokens=2048,
    eos_token_ids=(END,),
)
PROMPTS = ("The capital of France is", TEXT * 3 + "In short,", TEXT * 3 + "Therefore")


def server(machine: Machine) -> dict[str, Any]:
    """Greedy tokens of a runner on the device, cold and warm, against a float32 one on the CPU."""
    device = machine.pick("cuda", "cpu")
    prompts = machine.pick(PROMPTS, PROMPTS[:1])
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "random"
        write_model(model)
        answers = {
            name: _ask_runner(model, name, prompts) for name in dict.fromkeys((device, "cpu"))
        }
    got, expected = answers[device], answers["cpu"]
    same = [one == other for one, other in zip(got["texts"], expected["texts"], strict=True)]
    facts = {"device": device, "start_s": got["start_s"], "same_text": same}
    if not all(same):
        raise AssertionError(f"{facts}: {got['texts']} against {expected['texts']}")
    return facts | {"cached_tokens": got["cached_tokens"], "answer_s": got["answer_s"]}


def write_model(folder: Path) -> None:
    """Write a small Llama of random, seeded weights that reads and says bytes."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in tensor_shapes(MODEL):
        # Wide enough that no two logits are nearly the same.
        scale = 3 * shape[-1] ** -0.5
        random = torch.randn(shape, generator=generator) * scale
        tensors[name] = random if len(shape) > 1 else torch.ones(shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": MODEL.vocab_size,
        "hidden_size": MODEL.hidden_size,
        "num_hidden_layers": MODEL.num_layers,
        "num_attention_heads": MODEL.num_heads,
        "num_key_value_heads": MODEL.num_kv_heads,
        "head_dim": MODEL.head_dim,
        "intermediate_size": MODEL.ffn_size,
        "max_position_embeddings": MODEL.context_tokens,
        "rms_norm_eps": MODEL.norm_eps,
        "rope_theta": MODEL.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": END,
    }
    (folder / "config.json").write_text(json.dumps(facts))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: at for at, text in enumerate([*alphabet, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def _ask_runner(model: Path, device: str, prompts: tuple[str, ...]) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "runner", "--model", str(model), "--port", str(port)]
    command += ["--device", device, "--pool-tokens", "4096"]
    begun_s = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            _wait_until_up(process, port, begun_s + START_S)
            start_s = time.monotonic() - begun_s
            # Each prompt twice: computed, then from the cache.
            asked = [_complete(port, prompt) for prompt in prompts for _ in range(2)]
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
    return {
        "start_s": round(start_s, 2),
        "texts": [text for text, _, _ in asked],
        "cached_tokens": [cached for _, cached, _ in asked],
        "answer_s": [round(elapsed_s, 3) for _, _, elapsed_s in asked],
    }


def _wait_until_up(process: subprocess.Popen[str], port: int, end_s: float) -> None:
    while time.monotonic() < end_s:
        if process.poll() is not None:
            said = process.stderr.read() if process.stderr is not None else ""
            raise RuntimeError(f"the runner ended with {process.returncode}: {said[-500:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"the runner did not answer within {START_S:.0f} s")


def _complete(port: int, prompt: str) -> tuple[str, int, float]:
    body = {"model": "random", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    begun_s = time.monotonic()
    # Our own address, made above.
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:  # noqa: S310
        answer = json.load(response)
    details = answer["usage"].get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens", 0)
    return answer["choices"][0]["text"], cached, time.monotonic() - begun_s
