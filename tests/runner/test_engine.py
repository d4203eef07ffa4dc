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
