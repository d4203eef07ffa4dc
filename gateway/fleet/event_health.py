"""Whether a worker's KV events may be believed, and in one word why not.

Events that do not come, do not decode, yield nothing or contradict themselves would leave the index
silently wrong. Each such state has a word, shown per worker, and a cure that is looked for in what
comes next.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from prefix_index.events import BlockStored

if TYPE_CHECKING:
    from prefix_index.events import EventBatch

# A worker that computes new blocks speaks at the end of an engine step; a step of a huge prefill
# takes a few seconds.
MAX_SILENCE_S = 10.0
# Once may be a stray message; three in a row are another language.
MAX_UNDECODABLE = 3
# How long one broken message is shown.
SHOW_ERROR_S = 60.0
# Batches in a row that announce blocks and yield none. A late joiner sees only the ends of running
# conversations; the next new one ends the row within as many steps.
MAX_BARREN_BATCHES = 64
# Events that contradict themselves. One may come of a bug in an odd request.
MAX_IMPLAUSIBLE = 3
# Prompts in a row of which the worker announced other blocks than the ones we sent.
MAX_UNSEEN_PROMPTS = 3
# Answers in a row that report less than half of what events claimed. Single ones are evictions
# between routing and prefill.
MAX_OVERCLAIMS = 5
# Where what comes may never tell that a doubt is over, events get another trial after a while.
TRIAL_AFTER_S = 300.0


class EventHealth(StrEnum):
    """State of a worker's events (bounded: it is shown and is a metric label)."""

    OFF = "off"
    WAITING = "waiting"
    OK = "ok"
    SILENT = "kv_events_silent"
    UNREACHABLE = "kv_events_unreachable"
    UNDECODABLE = "kv_events_undecodable"
    USELESS = "kv_events_useless"
    IMPLAUSIBLE = "kv_events_implausible"
    BLOCK_SIZE = "kv_events_block_size"
    MISMATCH = "kv_events_mismatch"
    OVERCLAIM = "kv_events_overclaim"
    WITHOUT_SALT = "kv_events_without_salt"
    WRONG_RANK = "kv_events_wrong_rank"


EFFECTS = {
    EventHealth.SILENT: "nothing came though prompts were computed; check kv_events and that the "
    "engine publishes",
    EventHealth.UNREACHABLE: "the address cannot be used; check kv_events and kv_topic",
    EventHealth.UNDECODABLE: "what comes is no events; check that the engine's version is "
    "supported",
    EventHealth.USELESS: "events come but continue what was never announced; check kv_replay",
    EventHealth.IMPLAUSIBLE: "events contradict themselves",
    EventHealth.MISMATCH: "events come but not of the prompts that are sent there; check "
    "kv_events and kv_topic",
    EventHealth.BLOCK_SIZE: "its block size is no whole multiple of the pool's; set "
    "pools[].block_size to one that divides those of all its workers",
    EventHealth.OVERCLAIM: "its answers report far fewer cached tokens than its events claim",
    EventHealth.WITHOUT_SALT: "its events omit the salt of requests that have one",
    EventHealth.WRONG_RANK: "events of another data-parallel rank come here; check the order of "
    "kv_events",
}


ON_TRIAL = frozenset(
    {
        EventHealth.IMPLAUSIBLE,
        EventHealth.MISMATCH,
        EventHealth.OVERCLAIM,
        EventHealth.WITHOUT_SALT,
    }
)


def cures(doubt: EventHealth, batch: EventBatch, block_size: int) -> bool:
    """Say whether a batch shows that a doubt is over.

    Args:
        doubt: Why events were not believed any more.
        batch: What came now.
        block_size: The pool's.
    """
    if doubt in ON_TRIAL - {EventHealth.WITHOUT_SALT}:
        return False  # a new process is believed again, or after a while on trial
    stored = [event for event in batch.events if isinstance(event, BlockStored)]
    if doubt is EventHealth.USELESS:
        return any(_begins_prompt(event, block_size) for event in stored)
    if doubt is EventHealth.WITHOUT_SALT:
        return any(
            isinstance(key, str) and key != event.lora_name
            for event in stored
            if event.parent_block_hash is None
            for keys in event.extra_keys or ()
            for key in keys or ()
        )
    if doubt is EventHealth.UNDECODABLE:
        return bool(batch.events)
    return True


def _begins_prompt(event: BlockStored, block_size: int) -> bool:
    return (
        event.parent_block_hash is None
        and event.block_size > 0
        and event.block_size % block_size == 0
        and len(event.block_hashes) * event.block_size == len(event.token_ids)
    )
