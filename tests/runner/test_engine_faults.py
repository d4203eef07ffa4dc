"""An engine that cannot go on says so, and one that can goes on, whatever failed between steps."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from runner.engine import Engine, EngineStoppedError
from runner.model import Model
from tests.runner.fake_tiers import FakeTiers
from tests.runner.test_engine import CONFIG, Inbox, engine_over, request, wait_until


def test_an_abort_that_fails_ends_all_requests_and_the_engine_goes_on(tiny: Model) -> None:
    tiers = FakeTiers()
    engine = engine_over(tiers, tiny)
    waiting, after = Inbox(), Inbox()
    tiers.is_pending = True
    engine.submit(request("a", waiting, list(range(2, 52))))
    wait_until(lambda: engine.stats().num_waiting == 1 and bool(tiers.queries))

    def fail(owner: str) -> None:
        raise OSError("a tier's books are damaged")

    tiers.cancel = fail  # type: ignore[method-assign]
    engine.abort("a")

    assert "damaged" in (waiting.wait().error or "")
    del tiers.cancel
    tiers.is_pending = False
    engine.submit(request("b", after, [2, 3, 4]))
    assert after.wait().finish_reason == "length"
    assert engine.fault() is None
    assert engine.stop(10)


def test_an_engine_whose_every_turn_fails_ends_and_says_so(tiny: Model) -> None:
    tiers = FakeTiers()
    engine = engine_over(tiers, tiny)
    inbox = Inbox()

    def fail(*_: object) -> None:
        raise OSError("nobody knows when to wake up")

    tiers.next_wake_s = fail  # type: ignore[method-assign]
    engine.submit(request("a", inbox, [2, 3, 4]))

    inbox.wait()
    wait_until(lambda: engine.fault() == "the engine has ended")
    with pytest.raises(EngineStoppedError):
        engine.submit(request("b", Inbox(), [2, 3, 4]))


class HangingModel:
    """The real model, except that a step waits until it may go on."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.is_hanging = threading.Event()
        self.may_go_on = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, chunks: Any, pool: Any) -> Any:
        self.is_hanging.set()
        assert self.may_go_on.wait(60)
        return self._model.forward(chunks, pool)


def test_a_step_that_does_not_end_is_a_fault_until_it_does(tiny: Model) -> None:
    now_s, model = [0.0], HangingModel(tiny)
    engine = Engine(model, CONFIG, clock=lambda: now_s[0])  # type: ignore[arg-type]
    engine.start()
    inbox = Inbox()
    now_s[0] = 1e4
    # However long nobody has asked for anything.
    assert engine.fault() is None
    engine.submit(request("a", inbox, [2, 3, 4]))
    assert model.is_hanging.wait(20)
    now_s[0] += 60.0
    assert engine.fault() is None
    now_s[0] += 600.0
    assert "has not come back" in (engine.fault() or "")

    model.may_go_on.set()
    inbox.wait()
    wait_until(lambda: engine.fault() is None)
    assert engine.stop(10)
