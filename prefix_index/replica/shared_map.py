"""A small map of bytes that all gateways have: tool orders, learned constants, anchors.

Each gateway keeps what it needs itself; this carries entries between them. Writes are put behind
the caller and coalesced, reads never happen on demand: everything is loaded at the start and then
followed. The server decides who was first, and which entries have to go.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

from prefix_index.replica.codec import SharedValueError
from prefix_index.replica.lease import KEPT_S
from prefix_index.replica.link import LINK_ERRORS, answer
from prefix_index.replica.scripts import Script
from prefix_index.replica.tail import Tail, field
from prefix_index.replica.tasks import run_together

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from prefix_index.replica.link import Link

MAX_VALUE_BYTES: Final = 256 * 1024
"""A list of 250 tools; what is larger is not shared."""

_MAX_KEY_BYTES: Final = 256
# Writes that wait for a Redis that is away; beyond it the oldest are dropped.
_MAX_WAITING: Final = 4096
# Entries per call of the script, and the bytes of them: other clients wait meanwhile.
_BATCH_ENTRIES: Final = 64
_BATCH_BYTES: Final = 256 * 1024
_FLUSH_EVERY_S: Final = 0.05
_SCAN_FIELDS: Final = 128
# Changes kept for gateways that fall behind; one that falls further behind loads again.
_STREAM_CHANGES: Final = 1024

# KEYS: map, order, stream. ARGV: 1 = the first value wins, most entries, ttl ms, stream bound, then
# key and value of each entry. Returns the values that hold now. The order is the server's count of
# writes, least recent first.
_PUT: Final = Script("""
for i, kind in ipairs({'hash', 'zset', 'stream'}) do
  local found = redis.call('TYPE', KEYS[i]).ok
  if found ~= kind and found ~= 'none' then redis.call('UNLINK', KEYS[i]) end
end
local newest = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')
local count = tonumber(newest[2]) or 0
local values = {}
for i = 5, #ARGV, 2 do
  local key, value = ARGV[i], ARGV[i + 1]
  local held = redis.call('HGET', KEYS[1], key)
  if not held or ARGV[1] == '0' then
    if held ~= value then
      redis.call('HSET', KEYS[1], key, value)
      redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[4], '*', 'k', key, 'v', value)
    end
    held = value
  end
  count = count + 1
  redis.call('ZADD', KEYS[2], count, key)
  values[#values + 1] = held
end
local surplus = redis.call('HLEN', KEYS[1]) - tonumber(ARGV[2])
if surplus > 0 then
  local oldest = redis.call('ZPOPMIN', KEYS[2], surplus)
  for i = 1, #oldest, 2 do redis.call('HDEL', KEYS[1], oldest[i]) end
  -- Fields that are in no order were written by somebody else.
  if #oldest == 0 then redis.call('UNLINK', KEYS[1]) end
end
for i = 1, 3 do redis.call('PEXPIRE', KEYS[i], ARGV[3]) end
return values
""")


class SharedMap:
    """One map; event loop only. ``run`` must be running for anything to happen.

    Args:
        link: Connection.
        name: Name of the map, its hash tag.
        max_entries: Most entries in Redis; the least recently written go first.
        first_wins: An entry stays as it was first written, whoever writes it later.
        on_entry: Called with each entry of others, and with the winner where ours came too late.

    Attributes:
        dropped: Entries that were not shared: too large, or too many while Redis was away.
        decode_errors: Values in Redis that are no entries.
    """

    def __init__(
        self,
        link: Link,
        name: str,
        *,
        max_entries: int,
        first_wins: bool,
        on_entry: Callable[[bytes, bytes], None],
    ) -> None:
        self.dropped = 0
        self.decode_errors = 0
        self._link = link
        self._first_wins = first_wins
        self._max_entries = max_entries
        self._on_entry = on_entry
        self._keys = [link.key(name, kind) for kind in ("map", "order", "changes")]
        self._tail = Tail(link, self._keys[2])
        self._waiting: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_outages = -1

    @property
    def num_waiting(self) -> int:
        """Entries still to be written."""
        return len(self._waiting)

    def put(self, key: bytes, value: bytes) -> None:
        """Share an entry, some time soon. Returns at once."""
        if len(key) > _MAX_KEY_BYTES or len(value) > MAX_VALUE_BYTES:
            self.dropped += 1
            return
        if self._first_wins:
            self._waiting.setdefault(key, value)
        else:
            self._waiting[key] = value
        if len(self._waiting) > _MAX_WAITING:
            self._waiting.popitem(last=False)
            self.dropped += 1

    async def run(self) -> None:
        """Load, follow and write until cancelled."""
        await run_together(self._forever(self._follow), self._forever(self._flush))

    async def _forever(self, step: Callable[[], Coroutine[None, None, None]]) -> None:
        while True:
            try:
                if self._link.is_up:
                    await step()
            except LINK_ERRORS as error:
                self._link.report(error)
                await asyncio.sleep(_FLUSH_EVERY_S)
            if step == self._flush or not self._link.is_up:
                await asyncio.sleep(_FLUSH_EVERY_S)

    async def _follow(self) -> None:
        if self._num_outages != self._link.num_outages:
            # Also after an outage: what came meanwhile may be trimmed already, and maps are small.
            num_outages = self._link.num_outages
            self._tail.at = None
            await self._tail.start()
            await self._load()
            self._num_outages = num_outages
        entries = await self._tail.read()
        for _, fields in entries:
            try:
                self._heard(field(fields, b"k"), field(fields, b"v"))
            except SharedValueError:
                self.decode_errors += 1
        await asyncio.sleep(0)

    async def _load(self) -> None:
        cursor, is_first = 0, True
        while cursor or is_first:
            is_first = False
            found: Any = await answer(
                self._link.client.hscan(self._keys[0], cursor, count=_SCAN_FIELDS)
            )
            cursor = int(found[0])
            for key, value in found[1].items():
                self._heard(key, value)
            await asyncio.sleep(0)

    async def _flush(self) -> None:
        """Write what waits; an entry stays until the server has it."""
        while self._waiting:
            batch: dict[bytes, bytes] = {}
            size = 0
            for key, value in self._waiting.items():
                if len(batch) >= _BATCH_ENTRIES or (batch and size + len(value) > _BATCH_BYTES):
                    break
                batch[key] = value
                size += len(value)
            args: list[bytes | str | int] = [int(self._first_wins), self._max_entries]
            args += [int(KEPT_S * 1000), _STREAM_CHANGES]
            for key, value in batch.items():
                args += (key, value)
            winners = await _PUT.run(self._link.client, self._keys, args)
            for (key, value), winner in zip(batch.items(), winners, strict=True):
                if self._waiting.get(key) == value:  # else it was put again meanwhile
                    del self._waiting[key]
                if winner != value:
                    self._heard(key, winner)

    def _heard(self, key: bytes, value: bytes) -> None:
        if len(key) > _MAX_KEY_BYTES or len(value) > MAX_VALUE_BYTES:
            self.decode_errors += 1
            return
        if key in self._waiting and not self._first_wins:
            return  # ours is newer
        self._on_entry(key, value)
