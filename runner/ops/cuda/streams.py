"""The only code that touches streams and events: who waits for whom on the device.

Work of a stream runs in order; work of two streams runs in any order unless one waits for an event
of the other. Three streams touch the pool: *compute* (steps, the engine thread), *load* (into
blocks reserved for loading) and *store* (out of pinned blocks), the last two fed by transfer
threads. ``PoolOrder`` keeps the rules that make this safe:

- a store waits for the last step that was launched, which is no earlier than the one that wrote
  its block, and for loads that were begun group by group;
- a load waits for the last step that was launched, which is no earlier than any that could read
  the block's former content;
- a step's layer waits for the loads of its layer group that were announced as still under way.

``StreamApi`` is what torch offers, so that the rules can be tested against a device that is as
late as it may be.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class StreamApi(Protocol):
    """Streams and events of one device; streams and events are opaque."""

    def compute(self) -> Any:
        """Return the stream that the calling thread launches kernels on."""
        ...

    def new_stream(self, *, is_urgent: bool) -> Any:
        """Return a stream of its own."""
        ...

    def record(self, stream: Any) -> Any:
        """Return an event that happens when all that is on the stream now is done."""
        ...

    def hold(self, stream: Any, event: Any) -> None:
        """Let what follows on the stream wait for an event; returns at once."""
        ...

    def wait(self, event: Any) -> None:
        """Block the calling thread until an event has happened."""
        ...

    def mark(self, stream: Any) -> Any:
        """Return what remembers when all that is on the stream now was done."""
        ...

    def elapsed_s(self, first: Any, second: Any) -> float:
        """Return the seconds from one mark to another; both must have been passed."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Put a copy on a stream; host memory must stay as it is until it is done."""
        ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return host memory that the device copies from and to by itself. uint8."""
        ...

    def is_pinned(self, host: torch.Tensor) -> bool:
        """Whether host memory is such memory."""
        ...


class CudaStreams:
    """``StreamApi`` of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def compute(self) -> Any:
        """See ``StreamApi``."""
        return torch.cuda.current_stream(self._device)

    def new_stream(self, *, is_urgent: bool) -> Any:
        """See ``StreamApi``."""
        # -1 is the higher of the two priorities that torch knows.
        priority = -1 if is_urgent else 0
        return torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]

    def record(self, stream: Any) -> Any:
        """See ``StreamApi``."""
        # A blocking wait sleeps: a spinning one would take the core that the engine needs.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def hold(self, stream: Any, event: Any) -> None:
        """See ``StreamApi``."""
        stream.wait_event(event)

    def wait(self, event: Any) -> None:
        """See ``StreamApi``."""
        event.synchronize()

    def mark(self, stream: Any) -> Any:
        """See ``StreamApi``."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def elapsed_s(self, first: Any, second: Any) -> float:
        """See ``StreamApi``."""
        return float(first.elapsed_time(second)) / 1e3

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """See ``StreamApi``."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """See ``StreamApi``."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, host: torch.Tensor) -> bool:
        """See ``StreamApi``."""
        return host.is_pinned()


class HostStreams:
    """``StreamApi`` where the interpreter computes on the CPU: everything is done at once."""

    def compute(self) -> None:
        """See ``StreamApi``."""

    def new_stream(self, *, is_urgent: bool) -> None:
        """See ``StreamApi``."""

    def record(self, stream: None) -> None:
        """See ``StreamApi``."""

    def hold(self, stream: None, event: None) -> None:
        """See ``StreamApi``."""

    def wait(self, event: None) -> None:
        """See ``StreamApi``."""

    def mark(self, stream: None) -> None:
        """See ``StreamApi``."""

    def elapsed_s(self, first: None, second: None) -> float:
        """See ``StreamApi``; nobody waits here."""
        return 0.0

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: None) -> None:
        """See ``StreamApi``."""
        target.copy_(source)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """See ``StreamApi``."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def is_pinned(self, host: torch.Tensor) -> bool:
        """See ``StreamApi``."""
        return True


@dataclass(frozen=True, slots=True)
class GroupedLoad:
    """A load whose layers become usable group by group.

    Attributes:
        first_layers: Of each group, ascending from 0.
        events: One for each group, in the order in which they happen.
    """

    first_layers: tuple[int, ...]
    events: tuple[Any, ...]


class PoolOrder:
    """Keeps the order of one pool's readers and writers; see the module."""

    def __init__(self, api: StreamApi) -> None:
        """Make the copy streams; on the engine's thread, before any step."""
        self._api = api
        self._load = api.new_stream(is_urgent=True)
        self._store = api.new_stream(is_urgent=False)
        self._last_step = api.record(api.compute())
        # A stream takes its work in the order of the calls: one caller at a time for each.
        self._load_lock = threading.Lock()
        self._store_lock = threading.Lock()
        self._announced: list[GroupedLoad] = []
        self._last_groups = self._last_step
        # Around everything that a step waited for a load, until somebody asks how long.
        self._holds: list[tuple[Any, Any]] = []

    def mark_step(self) -> None:
        """Note that all of a step has been launched; engine thread only."""
        self._last_step = self._api.record(self._api.compute())

    def wait_for_step(self) -> float:
        """Block until the last step is done; engine thread only.

        Returns:
            Seconds that the device stood still for loads in the steps since the last call.
        """
        self._api.wait(self._last_step)
        holds, self._holds = self._holds, []
        return sum(self._api.elapsed_s(begun, ended) for begun, ended in holds)

    def store(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy out of the pool into pinned memory; done when this returns. Transfer threads."""
        with self._store_lock:
            self._api.hold(self._store, self._last_step)
            self._api.hold(self._store, self._last_groups)
            self._api.copy(target, source, self._store)
            done = self._api.record(self._store)
        self._api.wait(done)

    def load(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy pinned memory into the pool; done when this returns. Transfer threads."""
        with self._load_lock:
            self._api.hold(self._load, self._last_step)
            self._api.copy(target, source, self._load)
            done = self._api.record(self._load)
        self._api.wait(done)

    def load_groups(
        self,
        groups: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
        first_layers: Sequence[int],
    ) -> GroupedLoad:
        """Copy pinned memory into the pool, group after group; returns at once. Transfer threads.

        The sources must stay as they are until ``wait_for`` returns. No step may use the targets
        before ``announce`` or ``wait_for``.

        Args:
            groups: Targets and sources of each layer group.
            first_layers: Of each group.
        """
        events = []
        with self._load_lock:
            self._api.hold(self._load, self._last_step)
            for pairs in groups:
                for target, source in pairs:
                    self._api.copy(target, source, self._load)
                events.append(self._api.record(self._load))
            self._last_groups = events[-1]
        return GroupedLoad(tuple(first_layers), tuple(events))

    def wait_for(self, load: GroupedLoad) -> None:
        """Block until all of a load is there."""
        self._api.wait(load.events[-1])

    def announce(self, load: GroupedLoad) -> None:
        """Let the next step use what is still being loaded; engine thread only."""
        self._announced.append(load)

    def before_layer(self, layer: int) -> None:
        """Let a step's layer wait for its group of every announced load; engine thread only."""
        for load in self._announced:
            if layer in load.first_layers:
                self._hold_step(load.events[load.first_layers.index(layer)])

    def before_step(self) -> None:
        """Let a whole step wait for every announced load; engine thread only."""
        for load in self._announced:
            self._hold_step(load.events[-1])
        self._announced.clear()

    def after_step(self) -> None:
        """Note the end of a step that has waited layer by layer; engine thread only."""
        self._announced.clear()
        self.mark_step()

    def _hold_step(self, event: Any) -> None:
        compute = self._api.compute()
        begun = self._api.mark(compute)
        self._api.hold(compute, event)
        self._holds.append((begun, self._api.mark(compute)))
