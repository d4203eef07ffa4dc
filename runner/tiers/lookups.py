"""What the remote tier holds: batched questions on a thread, answers believed for a short while."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.tiers.transfers import Job
from runner.tiers.types import BlockRecord, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.kvkeys import BlockChain, KvKey
    from runner.tiers.announce import Announcer
    from runner.tiers.remote import RemoteStore
    from runner.tiers.transfers import Lane

# A request waits this long for the answer at most; a store in the same rack takes 1 ms.
LOOKUP_TIMEOUT_S = 0.05

# Others write and evict there, so an answer ages. A block that was there is soon loaded, and then
# it is verified; one that was not may be written by a neighbour at any moment.
PRESENT_TTL_S = 5.0
ABSENT_TTL_S = 1.0

# About 30 MB of keys; the oldest answers go first.
MAX_ANSWERS = 200_000

# One question: 65k tokens of blocks of 16. What lies beyond is recomputed.
MAX_ASKED = 4096


@dataclass(slots=True)
class _Asked:
    """A question under way for one request."""

    deadline_s: float
    is_answered: bool = False


class RemoteIndex:
    """Answers and questions about the remote tier; engine thread only.

    Args:
        store: Is asked.
        lane: Asks it.
        announcer: Tells others what is there.
        clock: The monotonic clock that deadlines are on.
    """

    def __init__(
        self,
        store: RemoteStore,
        lane: Lane,
        announcer: Announcer,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._lane = lane
        self._announcer = announcer
        self._clock = clock
        # Key -> whether it is there, and until when that is believed.
        self._answers: OrderedDict[KvKey, tuple[bool, float]] = OrderedDict()
        self._asked: dict[str, _Asked] = {}
        # What others believe to be there, the latest last.
        self._announced: OrderedDict[KvKey, None] = OrderedDict()
        self._latest: tuple[BlockChain, int] | None = None

    def holds(self, key: KvKey, now_s: float) -> bool | None:
        """Return whether a block is there as far as we know; None: not known."""
        is_there, until_s = self._answers.get(key, (False, float("-inf")))
        return is_there if now_s < until_s else None

    def note(self, key: KvKey, is_there: bool, now_s: float) -> None:
        """Note what has just been seen."""
        ttl_s = PRESENT_TTL_S if is_there else ABSENT_TTL_S
        self._answers[key] = is_there, now_s + ttl_s
        self._answers.move_to_end(key)
        if len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def announce(self, chain: BlockChain, index: int) -> None:
        """Tell others that block ``index`` of a sequence is there, if they do not know."""
        key = chain.keys[index]
        self._latest = chain, index
        if key not in self._announced:
            self._announcer.stored("remote", chain, index)
        self._announced[key] = None
        self._announced.move_to_end(key)
        if len(self._announced) > MAX_ANSWERS:
            self._retract(next(iter(self._announced)))

    def lose(self, key: KvKey, now_s: float) -> None:
        """Note that a block is not there although it should be."""
        self.note(key, False, now_s)
        self._retract(key)

    def _retract(self, key: KvKey) -> None:
        if key in self._announced:
            del self._announced[key]
            self._announcer.removed("remote", key)

    def is_waiting(self, owner: str, keys: Sequence[KvKey], now_s: float) -> bool:
        """Whether the owner should ask again later; asks what is not known, once per owner."""
        asked = self._asked.get(owner)
        if asked is None:
            unknown = [key for key in keys[:MAX_ASKED] if self.holds(key, now_s) is None]
            if not unknown:
                return False
            self._ask(owner, unknown, now_s)
            return True
        if not asked.is_answered and now_s < asked.deadline_s:
            return True
        self.forget(owner)
        return False

    def forget(self, owner: str) -> None:
        """Forget that an owner has asked; its answer is noted all the same."""
        self._asked.pop(owner, None)

    def next_deadline_s(self) -> float | None:
        """Return when the first question runs out; None without one."""
        return min((asked.deadline_s for asked in self._asked.values()), default=None)

    def some_place(self, now_s: float) -> Place | None:
        """Return a block that was seen there last, to try the tier with; None if it has gone."""
        if self._latest is None:
            return None
        chain, at = self._latest
        if self.holds(chain.keys[at], now_s) is False:
            return None
        return Place(BlockRecord(chain.keys[at], chain.parent(at), chain.tokens[at], at))

    def clear(self) -> None:
        """Forget all answers; what is there stays there."""
        self._answers.clear()
        self._latest = None
        for key in list(self._announced):
            self._retract(key)

    def _ask(self, owner: str, keys: Sequence[KvKey], now_s: float) -> None:
        asked = self._asked[owner] = _Asked(now_s + LOOKUP_TIMEOUT_S)
        answers: list[bool] = []

        def run() -> None:
            answers.extend(self._store.exists(keys, asked.deadline_s))

        def settle(job: Job) -> None:
            asked.is_answered = True
            noted_s = self._clock()
            for key, is_there in zip(keys, answers, strict=False):
                self.note(key, is_there, noted_s)
                # A server that is away holds nothing for now, yet has lost nothing.
                if not is_there and not self._store.is_paused:
                    self._retract(key)

        self._lane.submit(Job(0, run, settle))
