"""What must happen atomically, as Lua scripts that run in the server.

All time in them is the server's (key expiry, stream ids): gateways' clocks differ by seconds. All
keys of a call carry one hash tag and are declared. Redis 7 and Valkey.
"""

from __future__ import annotations

from hashlib import sha1
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import NoScriptError

from prefix_index.replica.link import answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefix_index.replica.address import Client


class Script:
    """A script that the server keeps by its digest, sent again whenever it forgot it."""

    def __init__(self, text: str) -> None:
        self._text = text
        # The server's name for a script, no security.
        self._sha = sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def run(
        self, client: Client, keys: Sequence[str], args: Sequence[bytes | str | int]
    ) -> Any:
        """Run it.

        Raises:
            RedisError: As any command.
        """
        try:
            return await answer(client.evalsha(self._sha, len(keys), *keys, *args))
        except NoScriptError:
            return await answer(client.eval(self._text, len(keys), *keys, *args))


# KEYS: generation counter, stream, then lease, meta, state of each worker.
# ARGV: holder, lease ttl ms, state ttl ms, then per worker 1 = wants the lease, 0 = does not.
# A lease's value is "holder generation". Renews ours, takes the free ones that are wanted, and says
# for each worker: lease, meta (id, head, block size, size), number of blocks. A key of a wrong type
# is somebody's mischief or another program's: it goes, and its holder writes it anew.
TICK: Final = Script("""
local function typed(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('UNLINK', key) end
end
local kept, ttl = tonumber(ARGV[3]), tonumber(ARGV[2])
typed(KEYS[2], 'stream')
redis.call('PEXPIRE', KEYS[2], kept)
local answers = {}
for i = 4, #ARGV do
  local at = 3 + (i - 4) * 3
  local lease_key, meta, state = KEYS[at], KEYS[at + 1], KEYS[at + 2]
  typed(lease_key, 'string') typed(meta, 'hash') typed(state, 'hash')
  local lease = redis.call('GET', lease_key)
  if not lease and ARGV[i] == '1' then
    local generation = redis.pcall('INCR', KEYS[1])
    if type(generation) ~= 'number' then
      redis.call('SET', KEYS[1], 1)
      generation = 1
    end
    redis.call('PEXPIRE', KEYS[1], kept)
    lease = ARGV[1] .. ' ' .. generation
    redis.call('SET', lease_key, lease, 'PX', ttl)
  elseif lease and string.sub(lease, 1, #ARGV[1] + 1) == ARGV[1] .. ' ' then
    redis.call('PEXPIRE', lease_key, ttl)
    redis.call('PEXPIRE', meta, kept)
    redis.call('PEXPIRE', state, kept)
  end
  local found = redis.call('HMGET', meta, 'id', 'head', 'block_size', 'size')
  answers[#answers + 1] = {lease or '', found[1] or '', found[2] or '', found[3] or '',
    found[4] or '', redis.call('HLEN', state)}
end
return answers
""")

# KEYS: lease, meta, state, stream.
# ARGV: lease value, id of the delta before this one or '*' for a reset, epoch, sequence, head,
# block size, worker, delta, stream bound, ttl ms, most blocks, number of pairs, pairs, gone.
# Returns the new id, or why not: 'fenced' (the lease is not ours any more), 'behind' (the state is
# not what the holder believes), 'stale' (older than what is there), 'full'.
PUBLISH: Final = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'fenced' end
local last = ARGV[2]
if last == '*' then
  redis.call('UNLINK', KEYS[2], KEYS[3])
else
  local found = redis.call('HMGET', KEYS[2], 'id', 'epoch', 'sequence', 'size')
  if (found[1] or '') ~= last then return 'behind' end
  if tonumber(found[4]) ~= redis.call('HLEN', KEYS[3]) then return 'behind' end
  local epoch, sequence = tonumber(ARGV[3]), tonumber(ARGV[4])
  local held_epoch, held_sequence = tonumber(found[2]) or 0, tonumber(found[3]) or 0
  if epoch < held_epoch or (epoch == held_epoch and sequence < held_sequence) then
    return 'stale'
  end
end
local first, pairs_end = 13, 12 + 2 * tonumber(ARGV[12])
if pairs_end >= first then redis.call('HSET', KEYS[3], unpack(ARGV, first, pairs_end)) end
if #ARGV > pairs_end then redis.call('HDEL', KEYS[3], unpack(ARGV, pairs_end + 1)) end
local id = redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[9], '*',
  'w', ARGV[7], 'p', last, 'h', ARGV[5], 'd', ARGV[8])
local size = redis.call('HLEN', KEYS[3])
redis.call('HSET', KEYS[2], 'id', id, 'epoch', ARGV[3], 'sequence', ARGV[4], 'head', ARGV[5],
  'block_size', ARGV[6], 'size', size)
for i = 2, 4 do redis.call('PEXPIRE', KEYS[i], ARGV[10]) end
if size > tonumber(ARGV[11]) then return {id, 'full'} end
return id
""")

# KEYS: leases. ARGV: holder. Gives up what is ours, so that others need not wait.
RELEASE: Final = Script("""
for i = 1, #KEYS do
  local lease = redis.pcall('GET', KEYS[i])
  if type(lease) == 'string' and string.sub(lease, 1, #ARGV[1] + 1) == ARGV[1] .. ' ' then
    redis.call('UNLINK', KEYS[i])
  end
end
return 1
""")

# KEYS: lease, meta, state, stream. ARGV: holder, worker, head of a reset, stream bound.
# Forgets a worker, unless somebody else reads its events at this moment. No look at other keys.
REMOVE: Final = Script("""
local lease = redis.pcall('GET', KEYS[1])
if type(lease) == 'string' and string.sub(lease, 1, #ARGV[1] + 1) ~= ARGV[1] .. ' ' then
  return 0
end
local had = redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
if had > 0 and redis.call('EXISTS', KEYS[4]) == 1 then
  redis.pcall('XADD', KEYS[4], 'MAXLEN', '~', ARGV[4], '*', 'w', ARGV[2], 'p', '*', 'h', ARGV[3],
    'd', '')
end
return had
""")

# KEYS: states of workers. ARGV: hashes of a chain, one after the other.
# Says how many leading blocks each worker has, by bisection: a worker's blocks leave last first.
# Workers tend to have the same part of a chain, so the end of the last one's is looked at first.
LOOKUP: Final = Script("""
local chain, answers, blocks = ARGV[1], {}, {}
local number = #chain / 16
local guess = number
for i = 1, #KEYS do
  local key = KEYS[i]
  local function has(at)
    local block = blocks[at]
    if not block then
      block = string.sub(chain, at * 16 - 15, at * 16)
      blocks[at] = block
    end
    return redis.call('HEXISTS', key, block) == 1
  end
  local low, high = 0, number + 1
  if has(1) then
    low = 1
    if guess > 1 then
      if has(guess) then low = guess else high = guess end
    end
    if low < number and low + 1 < high and low == guess and not has(low + 1) then
      high = low + 1
    end
    while high - low > 1 do
      local middle = math.floor((low + high) / 2)
      if has(middle) then low = middle else high = middle end
    end
    guess = low
  end
  answers[i] = low
end
return answers
""")
