"""Loads from host memory whose last layers arrive while the first are computed with.

The device is one whose copies into the pool happen when somebody waits for them, no sooner: a
missing wait shows as zeros, a late byte as keys of another prompt.
"""

from __future__ import annotations

import json
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from runner.kvkeys import BlockChain, root_key
from runner.metrics import TransferMeter
from runner.model import Model
from runner.ops.cuda.pool import CudaKvPool
from runner.tiers.assemble import build_tiers
from runner.tiers.options import TierOptions
from runner.weights import load_model
from tests.runner.conftest import TINY
from tests.runner.driver import Driver
from tests.runner.test_tiers_manager import PROMPT
from tests.runner.tier_parts import BLOCK_SIZE, ManualClock, Rig, payload_of

NUM_LAYERS = 4
BLOCK = 16


# Without something to compute after it a load is copied at once.
TAIL = [5 + 3 * at for at in range(20)]


class Lazy:
    """A ``StreamApi`` that computes at once and copies into the pool as late as it may.

    Attributes:
        is_lazy: Whoever waits for a copy waits until a step needs it; else it is made then.
        num_in_steps: Copies that were made since a layer of a step waited for them.
    """

    def __init__(self) -> None:
        self.is_lazy = False
        self.num_in_steps = 0
        self._changed = threading.Condition()
        self._todo: deque[Callable[[], object]] = deque()
        self._num_queued = self._num_done = 0

    @property
    def num_pending(self) -> int:
        return len(self._todo)

    def compute(self) -> str:
        return "compute"

    def new_stream(self, *, is_urgent: bool) -> str:
        return "load" if is_urgent else "store"

    def record(self, stream: str) -> int:
        return self._num_queued if stream == "load" else 0

    def hold(self, stream: str, event: int) -> None:
        if stream != "load":
            self.num_in_steps += self._run_to(event)

    def wait(self, event: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_done >= event or not self.is_lazy, 60)
        self._run_to(event)

    def mark(self, stream: str) -> int:
        return self._num_done

    def elapsed_s(self, first: int, second: int) -> float:
        """A copy takes a second."""
        return float(second - first)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: str) -> None:
        if stream != "load":
            target.copy_(source)
            return
        with self._changed:
            self._todo.append(lambda: target.copy_(source))
            self._num_queued += 1

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def is_pinned(self, host: torch.Tensor) -> bool:
        return True

    def be_lazy(self, is_lazy: bool) -> None:
        with self._changed:
            self.is_lazy = is_lazy
            self._changed.notify_all()

    def _run_to(self, event: int) -> int:
        with self._changed:
            num_before = self._num_done
            while self._num_done < event:
                self._todo.popleft()()
                self._num_done += 1
            self._changed.notify_all()
            return self._num_done - num_before


class LazyModel:
    """The CPU's model over a pool of ``Lazy``; waits where the GPU's kernels do."""

    def __init__(self, model: Model, api: Lazy) -> None:
        self._model = model
        self._api = api
        self._write_kv = model._write_kv
        model._write_kv = self._write_later  # type: ignore[method-assign]
        self._pool: CudaKvPool | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def new_pool(self, num_blocks: int, block_size: int) -> CudaKvPool:
        api: Any = self._api
        cpu = torch.device("cpu")
        self._pool = CudaKvPool(
            num_blocks, block_size, self._model.config, torch.float32, cpu, api, None
        )
        return self._pool

    def _write_later(self, at: int, *rest: Any) -> torch.Tensor:
        assert self._pool is not None
        self._pool.order.before_layer(at)
        return self._write_kv(at, *rest)

    def forward(self, chunks: Any, pool: Any) -> Any:
        result = self._model.forward(chunks, pool)
        pool.order.after_step()
        return result


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of as many layers as there are groups."""
    folder = tmp_path_factory.mktemp("four-layers")
    torch.manual_seed(3)
    width, ffn, vocab = TINY["hidden_size"], TINY["intermediate_size"], TINY["vocab_size"]
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width // 2, width),
        "self_attn.v_proj": (width // 2, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (ffn, width),
        "mlp.up_proj": (ffn, width),
        "mlp.down_proj": (width, ffn),
    }
    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab, width) * 0.3,
        "lm_head.weight": torch.randn(vocab, width) * 0.3,
        "model.norm.weight": torch.ones(width),
    }
    for at in range(NUM_LAYERS):
        for name, shape in shapes.items():
            tensors[f"model.layers.{at}.{name}.weight"] = torch.randn(shape) * 0.3
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{at}.{name}.weight"] = torch.ones(width)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = TINY | {"num_hidden_layers": NUM_LAYERS, "architectures": ["LlamaForCausalLM"]}
    config |= {"model_type": "llama", "rope_theta": 10_000.0, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(2, 97) for _ in range(length)]


class World:
    """An engine over host memory and a lazy device."""

    def __init__(self, folder: Path, *, host_blocks: int = 64, **sizes: Any) -> None:
        self.api = Lazy()
        self.plain = load_model(folder, "float32", 1)
        model: Any = LazyModel(load_model(folder, "float32", 1), self.api)
        slot_bytes = NUM_LAYERS * 2 * BLOCK * 2 * 8 * 4
        options = TierOptions(host_bytes=host_blocks * slot_bytes)
        build = partial(build_tiers, options, observer=TransferMeter("test"))
        self.driver = Driver(model, build_tiers=build, **sizes)
        self.tiers: Any = self.driver.core._tiers
        # Computing is so dear that restoring always pays.
        for tokens in (16, 32, 64):
            self.tiers.observe_step(tokens, tokens * tokens, 0, float(tokens))
        # And stays so: a load has all the time that a busy machine may take for it.
        self.tiers.observe_step = lambda *step: None

    def cold(self, prompt: list[int]) -> list[int]:
        """What an engine without tiers says."""
        return Driver(self.plain).complete(prompt)

    def store(self, prompt: list[int]) -> list[int]:
        """Compute a prompt and move it from the pool into host memory."""
        tokens = self.driver.complete(prompt)
        full = len(prompt) // BLOCK
        self.driver.settle(lambda: self.held(prompt) >= full and self.is_at_rest())
        assert self.driver.core._pool.clear()
        return tokens

    def chain(self, prompt: list[int]) -> BlockChain:
        chain = BlockChain(root_key(self.driver.core.namespace), BLOCK)
        chain.extend(prompt)
        return chain

    def held(self, prompt: list[int]) -> int:
        books = self.tiers._tiers["cpu"].books
        return sum(books.get(key) is not None for key in self.chain(prompt).keys)

    def host_view(self, prompt: list[int], at: int) -> memoryview:
        key = self.chain(prompt).keys[at]
        slot = self.tiers._tiers["cpu"].books.get(key).slot
        view: memoryview = self.tiers._parts.host._arena.view(slot)
        return view

    def until_under_way(self) -> None:
        """Begin what has been submitted, without noticing that it has arrived."""
        self.driver.step()
        loader = self.tiers._loader
        loads = [load for load, _ in loader._loads.values()]
        assert loads
        for _ in range(6_000):
            if all(piece.has_arrived for load in loads for piece in load.pieces):
                return
            threading.Event().wait(0.01)
        raise AssertionError("the copy was not begun")

    def is_at_rest(self) -> bool:
        stats = self.driver.core.stats()
        cpu = self.tiers._tiers["cpu"]
        return not (
            stats.active_blocks
            or stats.loading_blocks
            or stats.pinned_blocks
            or len(cpu.leases)
            or cpu.books.num_pinned
            or any(lane.num_open for lane in self.tiers._parts.lanes)
        )

    def end(self) -> None:
        self.api.be_lazy(False)
        self.driver.settle(self.is_at_rest)
        self.driver.core.close()


@pytest.fixture
def make_world(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    monkeypatch.setattr("runner.tiers.loader.MIN_GROUPED_S", -1.0)
    worlds: list[World] = []

    def make(**sizes: Any) -> World:
        worlds.append(World(model_dir, **sizes))
        return worlds[-1]

    yield make
    for world in worlds:
        world.end()


def test_a_step_begins_before_all_layers_are_there_and_every_bit_is_the_same(
    make_world: Callable[..., World],
) -> None:
    world = make_world()
    prompt = prompt_of(100)
    asked = prompt + TAIL
    world.store(prompt)
    expected = world.cold(asked)
    kept = [bytes(world.host_view(prompt, at)) for at in range(6)]
    world.api.be_lazy(True)
    again = world.driver.submit(asked)
    world.driver.run()

    assert world.driver.tokens(again) == expected
    last = world.driver.last(again)
    assert (last.cached_tokens, last.hit_source) == (96, "cpu")
    assert world.api.num_in_steps >= NUM_LAYERS
    pool = world.driver.core._pool
    rows = world.driver.core._kv.data.view(torch.uint8).view(pool.num_blocks, -1)
    chain = world.chain(prompt)
    found = pool.find(chain, 6)
    assert [rows[block].numpy().tobytes() for block in found] == kept


def test_what_a_step_waits_for_its_layers_is_counted_as_a_stall(
    make_world: Callable[..., World],
) -> None:
    world = make_world()
    prompt = prompt_of(100)
    world.store(prompt)
    assert world.driver.core.stats().stall_s_total == 0
    world.api.be_lazy(True)
    world.driver.complete(prompt + TAIL)
    assert world.driver.core.stats().stall_s_total == world.api.num_in_steps > 0
    # Later steps have waited for nothing.
    before = world.driver.core.stats().stall_s_total
    world.driver.complete(prompt_of(30, seed=1))
    assert world.driver.core.stats().stall_s_total == before


@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_damage_in_any_layer_cuts_the_hit_before_anything_of_the_block_is_used(
    make_world: Callable[..., World], at: int, layer: int
) -> None:
    world = make_world()
    prompt = prompt_of(120)
    asked = prompt + TAIL
    world.store(prompt)
    expected = world.cold(asked)
    view = world.host_view(prompt, at)
    view[layer * len(view) // NUM_LAYERS] ^= 1
    world.api.be_lazy(True)
    again = world.driver.submit(asked)
    # A cut piece has to land as a whole: nobody else waits for it.
    while world.driver.core.has_work:
        world.driver.step()
        if world.api.num_pending and not world.driver.core.stats().num_running:
            world.api.be_lazy(False)

    assert world.driver.tokens(again) == expected
    assert world.driver.cached_tokens(again) == at * BLOCK
    [stats] = world.driver.core.stats().tiers
    assert stats.damaged_total == 1


def test_a_load_given_up_under_way_keeps_its_blocks_until_it_has_landed(
    make_world: Callable[..., World],
) -> None:
    world = make_world(pool_tokens=24 * BLOCK)
    prompt, other = prompt_of(130), prompt_of(110, seed=1)
    world.store(prompt)
    world.api.be_lazy(True)
    request = world.driver.submit(prompt + TAIL)
    world.until_under_way()
    loading = world.driver.core.stats().loading_blocks
    world.driver.core.abort(request)
    # Its load has not been announced: this step must not make it land, nor get its blocks.
    # Neither must a store, which waits for every load.
    assert world.driver.complete(other, max_offload_tokens=0) == world.cold(other)
    assert world.driver.core.stats().loading_blocks == loading > 0
    assert world.api.num_pending
    world.api.be_lazy(False)
    world.driver.settle(world.is_at_rest)
    assert world.driver.complete(prompt) == world.cold(prompt)


def test_blocks_of_an_aborted_request_are_not_written_by_what_is_still_under_way(
    make_world: Callable[..., World],
) -> None:
    # The other prompt needs the blocks that the first one's load still writes into.
    world = make_world(pool_tokens=10 * BLOCK)
    prompt, other = prompt_of(130), prompt_of(140, seed=1)
    world.store(prompt)
    expected = world.cold(other)
    world.api.be_lazy(True)
    request = world.driver.submit(prompt + TAIL)
    world.until_under_way()
    world.driver.core._poll(world.driver.core._clock())
    assert world.driver.core.stats().loading_blocks == 0
    assert world.api.num_pending
    world.driver.core.abort(request)
    assert world.driver.complete(other) == expected
    # What it left in the pool is right too.
    assert world.driver.complete(other) == expected


def test_answers_stay_right_while_everything_is_evicted_all_the_time(
    make_world: Callable[..., World],
) -> None:
    world = make_world(pool_tokens=24 * BLOCK, host_blocks=30, max_batched_tokens=64)
    rng = random.Random(11)
    documents = [prompt_of(rng.randrange(60, 160), seed) for seed in range(6)]
    prompts = [
        document[: rng.randrange(40, len(document) + 1)] + prompt_of(rng.randrange(1, 40), seed)
        for seed, document in enumerate(documents * 4)
    ]
    expected = [world.cold(prompt) for prompt in prompts]
    for _ in range(12):
        world.api.be_lazy(rng.random() < 0.7)
        asked = {world.driver.submit(prompts[at]): at for at in rng.sample(range(24), 3)}
        if rng.random() < 0.4:
            world.driver.step()
            gone = rng.choice(list(asked))
            world.driver.core.abort(gone)
            del asked[gone]
        num_stalls = 0
        while world.driver.core.has_work and num_stalls < 2_000:
            world.driver.step()
            if world.driver.core.sleep_s():
                world.driver.is_woken.wait(0.01)
                world.driver.is_woken.clear()
                num_stalls += 1
            if num_stalls > 30:
                # Loads that were cut short have nobody but their threads to wait for them.
                world.api.be_lazy(False)
        assert not world.driver.core.has_work
        for request, at in asked.items():
            assert world.driver.tokens(request) == expected[at]
    [stats] = world.driver.core.stats().tiers
    assert stats.evictions_total > 0
    assert world.api.num_in_steps > 0


class LateGroups:
    """A ``GroupMover`` whose copies land when the test says so."""

    def __init__(self, rows: np.ndarray) -> None:
        self.announced: list[object] = []
        self.is_broken = False
        self._rows = rows
        self._begun: list[tuple[list[memoryview], list[int]]] = []
        self._landed = threading.Event()

    def begin_in(self, sources: Sequence[memoryview], blocks: Sequence[int]) -> object:
        self._begun.append((list(sources), list(blocks)))
        return self._landed

    def wait_for(self, copy: threading.Event) -> None:
        assert copy.wait(30)
        if self.is_broken:
            raise RuntimeError("the device is gone")

    def announce(self, copy: object) -> None:
        self.announced.append(copy)

    def land(self) -> None:
        for sources, blocks in self._begun:
            for source, block in zip(sources, blocks, strict=True):
                self._rows[block] = np.frombuffer(source, dtype=np.uint8)
        self._landed.set()


class Under:
    """A rig with a load from host memory under way."""

    def __init__(self, host_slots: int = 12, tail_tokens: int = 64) -> None:
        self.clock = ManualClock()
        self.rig = rig = Rig(host_slots=host_slots, clock=self.clock)
        self.groups = LateGroups(rig.memory.rows)
        rig.memory.groups = self.groups
        self.chain = rig.compute(PROMPT)
        rig.settle()
        rig.forget_pool()
        query = rig.query(self.chain)
        query = type(query)(
            query.owner, query.chain, 0, len(self.chain.keys),
            len(self.chain.keys) * BLOCK_SIZE + tail_tokens, 0,
        )  # fmt: skip
        plan = rig.consider(query)
        assert plan is not None
        self.plan, self.blocks = plan, rig.start(plan)
        self.load = rig.tiers._loader._loads[plan.id][0]

    def wait_arrived(self) -> None:
        end = threading.Event()
        for _ in range(3_000):
            if all(piece.has_arrived for piece in self.load.pieces):
                return
            end.wait(0.01)
        raise AssertionError("it does not arrive")

    def rows(self) -> list[bytes]:
        return [self.rig.memory.rows[block].tobytes() for block in self.blocks]

    def end(self) -> None:
        self.rig.memory.loading -= set(self.blocks)
        self.rig.pool.release_loading(self.blocks)
        self.rig.check()
        self.rig.tiers.close()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.tiers.loader.MIN_GROUPED_S", -1.0)


@pytest.mark.usefixtures("always")
def test_slots_stay_pinned_until_the_copy_has_landed_however_full_host_memory_is() -> None:
    under = Under()
    rig = under.rig
    done = rig.wait(lambda: rig.taken(under.plan.id))
    assert (done.num_blocks, done.outcome) == (len(under.blocks), "done")
    assert len(under.groups.announced) == len(under.load.pieces)
    assert rig.tiers._tiers["cpu"].books.num_pinned == len(under.blocks)
    for seed in range(4):
        rig.compute([1_000 * (seed + 2) + at for at in range(8 * BLOCK_SIZE)])
        rig.poll()
    under.groups.land()
    rig.wait(lambda: not rig.tiers._tiers["cpu"].books.num_pinned)
    assert under.rows() == [payload_of(key) for key in under.chain.keys]
    under.end()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("end", ["cancelled", "late"])
def test_a_copy_under_way_is_waited_for_when_nobody_wants_it_any_more(end: str) -> None:
    under = Under()
    rig = under.rig
    under.wait_arrived()
    if end == "late":
        rig.pass_deadline()
    else:
        rig.tiers.cancel(under.plan.query.owner)
    for _ in range(3):
        rig.poll()
    assert rig.taken(under.plan.id) is None
    assert not under.groups.announced
    under.groups.land()
    done = rig.wait(lambda: rig.taken(under.plan.id))
    assert done.num_blocks == len(under.blocks)
    assert under.rows() == [payload_of(key) for key in under.chain.keys]
    under.end()


@pytest.mark.usefixtures("always")
def test_a_copy_that_fails_before_it_was_used_brings_nothing() -> None:
    under = Under()
    rig = under.rig
    under.wait_arrived()
    rig.tiers.cancel(under.plan.query.owner)
    under.groups.is_broken = True
    under.groups._landed.set()
    done = rig.wait(lambda: rig.taken(under.plan.id))
    assert done.num_blocks == 0
    under.end()


@pytest.mark.parametrize(("least_s", "tail_tokens"), [(1e9, 64), (-1.0, 1)])
def test_short_loads_and_those_with_nothing_to_compute_after_them_are_copied_at_once(
    monkeypatch: pytest.MonkeyPatch, least_s: float, tail_tokens: int
) -> None:
    monkeypatch.setattr("runner.tiers.loader.MIN_GROUPED_S", least_s)
    under = Under(tail_tokens=tail_tokens)
    done = under.rig.wait(lambda: under.rig.taken(under.plan.id))
    assert done.num_blocks == len(under.blocks)
    assert not under.groups.announced
    assert under.rows() == [payload_of(key) for key in under.chain.keys]
    under.end()
