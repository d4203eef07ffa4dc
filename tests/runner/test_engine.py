"""The engine as its callers see it: threads, failures, stopping, figures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runner.core import EngineCore
from runner.engine import Engine, EngineStoppedError
from runner.model import Model
from runner.types import EngineConfig, EngineRequest, SamplingParams, TokenOutput
from tests.runner.driver import Driver
from tests.runner.fake_tiers import FakeTiers

CONFIG = EngineConfig(pool_tokens=4096, max_seqs=16, max_batched_tokens=64, debug_checks=True)


class Inbox:
    """Collects one request's outputs from the engine thread."""

    def __init__(self) -> None:
        self.outputs: list[TokenOutput] = []
        self.done = threading.Event()

    def __call__(self, output: TokenOutput) -> None:
        self.outputs.append(output)
        if output.finish_reason:
            self.done.set()

    @property
    def tokens(self) -> list[int]:
        return [output.token_id for output in self.outputs if output.token_id is not None]

    def wait(self) -> TokenOutput:
        assert self.done.wait(20), "no end within 20 s"
        return self.outputs[-1]


def request(
    request_id: str, sink: Callable[[TokenOutput], None], prompt: list[int], **params: Any
) -> EngineRequest:
    settings = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | params
    return EngineRequest(request_id, prompt, SamplingParams(**settings), sink)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "not reached within 20 s"
        time.sleep(0.005)


@pytest.fixture
def engine(tiny: Model) -> Iterator[Engine]:
    engine = Engine(tiny, CONFIG)
    engine.start()
    yield engine
    assert engine.stop(10)


def test_requests_from_many_threads_all_get_their_tokens(engine: Engine, tiny: Model) -> None:
    prompts = {f"p{at}": [2 + at, 3, 4, 5 + at] * 6 for at in range(12)}
    inboxes = {name: Inbox() for name in prompts}
    threads = [
        threading.Thread(target=engine.submit, args=(request(name, inboxes[name], prompt),))
        for name, prompt in prompts.items()
    ]
    for thread in threads:
        thread.start()
    for name, prompt in prompts.items():
        assert inboxes[name].wait().finish_reason == "length"
        assert inboxes[name].tokens == Driver(tiny).complete(prompt)


def test_figures_count_requests_tokens_and_hits(engine: Engine) -> None:
    for name in ("a", "b"):
        inbox = Inbox()
        engine.submit(request(name, inbox, list(range(2, 52))))
        inbox.wait()
    wait_until(lambda: engine.stats().num_running == 0)

    stats = engine.stats()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (100, 16)
    assert (stats.query_tokens_total, stats.hit_tokens_total) == (100, 48)
    assert (stats.pool_blocks, stats.block_size) == (256, 16)
    # Two layers, keys and values, two heads of 8 floats.
    assert stats.block_bytes == 2 * 2 * 16 * 2 * 8 * 4
    assert stats.cached_blocks == 3
    assert stats.free_blocks + stats.cached_blocks + stats.active_blocks == 256


def test_requests_wait_in_the_figures_before_the_engine_has_read_them(tiny: Model) -> None:
    engine = Engine(tiny, CONFIG)
    inbox = Inbox()
    engine.submit(request("a", inbox, [2, 3]))
    assert engine.stats().num_waiting == 1

    engine.start()
    inbox.wait()
    assert engine.stop(10)
    assert engine.stats().num_waiting == 0


def test_an_abort_ends_a_request_and_frees_its_blocks(engine: Engine) -> None:
    inbox = Inbox()
    engine.submit(request("a", inbox, [2, 3, 4], max_tokens=400))
    wait_until(lambda: bool(inbox.tokens))
    engine.abort("a")

    assert inbox.wait().finish_reason == "abort"
    wait_until(lambda: engine.stats().active_blocks == 0)
    engine.abort("a")
    engine.abort("never seen")


def test_a_reset_answers_from_the_engine_thread(engine: Engine) -> None:
    inbox = Inbox()
    engine.submit(request("a", inbox, list(range(2, 52)), max_tokens=300))
    wait_until(lambda: bool(inbox.tokens))
    assert not engine.reset_prefix_cache()
    engine.abort("a")
    inbox.wait()

    assert engine.reset_prefix_cache()
    wait_until(lambda: engine.stats().cached_blocks == 0)


def test_stopping_aborts_what_runs_and_refuses_what_comes(tiny: Model) -> None:
    engine = Engine(tiny, CONFIG)
    engine.start()
    running, queued = Inbox(), Inbox()
    engine.submit(request("a", running, [2, 3, 4], max_tokens=400))
    wait_until(lambda: bool(running.tokens))
    engine.submit(request("b", queued, [2, 3, 4], max_tokens=400))

    assert engine.stop(10)
    assert running.wait().finish_reason == "abort"
    assert queued.wait().finish_reason == "abort"
    with pytest.raises(EngineStoppedError):
        engine.submit(request("c", Inbox(), [2]))
    assert not engine.reset_prefix_cache()
    assert engine.stats().active_blocks == 0


def test_a_second_request_with_a_running_id_is_refused(engine: Engine) -> None:
    first, second = Inbox(), Inbox()
    engine.submit(request("a", first, [2, 3, 4], max_tokens=200))
    engine.submit(request("a", second, [2, 3, 4]))

    assert second.wait().finish_reason == "error"
    assert first.wait().finish_reason == "length"


class FailingModel:
    """The real model, except that steps with a poisoned token fail."""

    POISON = 66

    def __init__(self, model: Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, chunks: Any, pool: Any) -> Any:
        if any(self.POISON in chunk.token_ids for chunk in chunks):
            raise MemoryError("no memory for this step")
        return self._model.forward(chunks, pool)


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(tiny: Model) -> None:
    engine = Engine(FailingModel(tiny), CONFIG)  # type: ignore[arg-type]
    engine.start()
    poisoned, waiting, after = Inbox(), Inbox(), Inbox()
    # The first chunk computes, the second, a whole step's budget, fails; another request waits.
    prompt = [2, 3, 4, 5] * 16
    engine.submit(request("bad", poisoned, [*prompt, FailingModel.POISON, *prompt], n=2))
    engine.submit(request("good", waiting, [*prompt, 7]))
    end = poisoned.wait()

    assert (end.finish_reason, end.error) == (
        "error",
        "the engine failed: MemoryError: no memory for this step",
    )
    assert {output.index for output in poisoned.outputs} == {0, 1}
    assert waiting.wait().finish_reason == "length"
    engine.submit(request("after", after, [2, 3, 4]))
    assert after.wait().finish_reason == "length"
    assert engine.stop(10)
    assert engine.stats().active_blocks == 0


def test_a_failing_receiver_ends_its_own_request_only(engine: Engine) -> None:
    def broken(output: TokenOutput) -> None:
        raise OSError("receiver is gone")

    inbox = Inbox()
    engine.submit(request("broken", broken, [2, 3, 4], n=3))
    engine.submit(request("good", inbox, [2, 3, 5]))

    assert inbox.wait().finish_reason == "length"
    wait_until(lambda: engine.stats().num_running == 0)
    assert engine.stats().active_blocks == 0


def test_a_failing_event_receiver_does_not_stop_the_engine(tiny: Model) -> None:
    def broken(events: object) -> None:
        raise OSError("publisher is gone")

    engine = Engine(tiny, CONFIG, broken)
    engine.start()
    inbox = Inbox()
    engine.submit(request("a", inbox, list(range(2, 50))))

    assert inbox.wait().finish_reason == "length"
    assert engine.stop(10)


def test_damaged_books_end_all_requests_and_leave_an_empty_working_pool(tiny: Model) -> None:
    driver = Driver(tiny, debug_checks=True)
    ids = [driver.submit([2, 3, 4] * 9, n=2), driver.submit([3, 4] * 9)]
    driver.step()
    driver.core._pool._books.references[0] += 1
    driver.core.step()

    assert all("InvariantError" in (driver.last(at).error or "") for at in ids)
    driver.check()
    assert driver.core.stats().free_blocks == driver.core.stats().pool_blocks
    assert len(driver.complete([5, 6, 7])) == 8


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_model_len": 513}, "max_model_len 513: must be 2 to 512"),
        ({"pool_tokens": 31}, "pool_tokens 31"),
        ({"max_batched_tokens": 15}, "max_batched_tokens 15"),
        ({"max_batched_tokens": 32, "max_seqs": 33}, "max_seqs"),
    ],
    ids=["context", "pool", "block", "samples"],
)
def test_sizes_that_contradict_each_other_are_refused(
    tiny: Model, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        EngineCore(tiny, EngineConfig(**sizes), None)


def engine_over(tiers: FakeTiers, model: Model) -> Engine:
    engine = Engine(model, CONFIG, build_tiers=tiers.build)
    engine.start()
    return engine


def test_a_load_that_ends_wakes_the_engine_and_what_all_waited_counts_as_stall(
    tiny: Model,
) -> None:
    tiers = FakeTiers()
    engine = engine_over(tiers, tiny)
    prompt = list(range(2, 52))
    first, again = Inbox(), Inbox()
    engine.submit(request("a", first, prompt))
    first.wait()
    assert engine.stats().stall_s_total == 0
    held = dict(tiers.held)
    assert engine.reset_prefix_cache()
    tiers.held, tiers.is_held = held, True
    engine.submit(request("b", again, prompt))
    wait_until(lambda: engine.stats().num_loading == 1 and engine.stats().stall_s_total > 0.05)
    assert (engine.stats().num_running, again.outputs) == (0, [])
    tiers.is_held = False
    tiers.wake()

    assert again.wait().hit_source == "disk"
    assert again.tokens == first.tokens
    assert engine.stop(10)


def test_a_load_beside_running_requests_is_no_stall(tiny: Model) -> None:
    tiers = FakeTiers()
    engine = engine_over(tiers, tiny)
    prompt = list(range(2, 52))
    first, again, other = Inbox(), Inbox(), Inbox()
    engine.submit(request("a", first, prompt))
    first.wait()
    held = dict(tiers.held)
    assert engine.reset_prefix_cache()
    tiers.held, tiers.is_held = held, True
    engine.submit(request("c", other, [2, 3, 4], max_tokens=450))
    wait_until(lambda: bool(other.tokens))
    engine.submit(request("b", again, prompt))
    wait_until(lambda: engine.stats().num_loading == 1)
    count = len(other.tokens)
    wait_until(lambda: len(other.tokens) > count + 5)
    assert engine.stats().stall_s_total == 0
    engine.abort("c")
    engine.abort("b")

    assert again.wait().finish_reason == "abort"
    assert engine.stop(10)


def test_an_idle_engine_polls_when_it_is_woken_and_when_the_tiers_want_it(tiny: Model) -> None:
    tiers = FakeTiers()
    engine = engine_over(tiers, tiny)
    polls = tiers.num_polls
    tiers.wake()
    wait_until(lambda: tiers.num_polls > polls)
    tiers.wake_in_s = 0.001
    tiers.wake()
    polls = tiers.num_polls

    wait_until(lambda: tiers.num_polls > polls + 3)
    assert engine.stop(10)
    assert tiers.is_closed


def test_stopping_ends_loads_and_closes_the_tiers_started_or_not(tiny: Model) -> None:
    unused = FakeTiers()
    assert Engine(tiny, CONFIG, build_tiers=unused.build).stop(10)
    assert unused.is_closed

    tiers = FakeTiers()
    engine = engine_over(tiers, tiny)
    prompt = list(range(2, 52))
    first, again = Inbox(), Inbox()
    engine.submit(request("a", first, prompt))
    first.wait()
    held = dict(tiers.held)
    assert engine.reset_prefix_cache()
    tiers.held, tiers.is_held = held, True
    engine.submit(request("b", again, prompt))
    wait_until(lambda: engine.stats().num_loading == 1)
    assert engine.stop(10)

    assert again.wait().finish_reason == "abort"
    assert tiers.cancelled == ["b.0"]
    assert tiers.is_closed


def test_a_step_is_timed_before_the_first_load_is_weighed(tiny: Model) -> None:
    tiers = FakeTiers()
    engine = Engine(tiny, EngineConfig(pool_tokens=4096), build_tiers=tiers.build)

    assert [step[:3] for step in tiers.steps] == [(128, 128 * 128, 0)]
    assert engine.stats().free_blocks == 256
    assert engine.stop(10)


def test_decisions_come_from_the_engine_thread(tiny: Model) -> None:
    tiers = FakeTiers()
    engine = engine_over(tiers, tiny)
    inbox = Inbox()
    engine.submit(request("a", inbox, list(range(2, 52))))
    inbox.wait()

    assert engine.decisions() == [{"owner": "a.0"}]
    assert engine.stop(10)
    assert engine.decisions() == []


@pytest.mark.parametrize("failing", ["poll", "consider", "offer", "start", "observe_step"])
def test_a_tier_manager_that_fails_ends_requests_and_the_engine_goes_on(
    tiny: Model, failing: str
) -> None:
    tiers = FakeTiers()
    driver = Driver(tiny, build_tiers=tiers.build)
    prompt = list(range(2, 52))
    driver.complete(prompt)
    held = dict(tiers.held)
    assert driver.core.reset_prefix_cache()
    tiers.held = held

    def fail(*_: object) -> None:
        raise OSError("a tier's books are damaged")

    setattr(tiers, failing, fail)
    request_id = driver.submit(prompt)
    for _ in range(3):
        driver.core.step()
    assert "damaged" in (driver.last(request_id).error or "")
    delattr(tiers, failing)
    tiers.held = {}
    driver.step()

    assert len(driver.complete(prompt)) == 8
    # Nobody knows whether a load that failed to start is being written: its blocks are given up.
    assert driver.core.stats().loading_blocks == (3 if failing == "start" else 0)
