"""Credit for siblings: who leads, who follows, and when it ends."""

from __future__ import annotations

from gateway.routing.pending import MAX_COMPARED, Pending
from prefix_index.blocks import BlockHash, hash_blocks, root_hash

ROOT = root_hash("m")


def chain(*parts: int) -> list[BlockHash]:
    """Ten blocks of four tokens for each part."""
    return hash_blocks([part for part in parts for _ in range(40)], 4, ROOT)


def test_the_common_beginning_is_credited_on_the_leaders_worker_until_it_ends() -> None:
    pending = Pending()
    leader = pending.lead("w0", chain(1, 2))
    assert leader is not None
    assert pending.credit(chain(1, 3)) == {"w0": 10}
    assert pending.credit(chain(1, 2, 9)) == {"w0": 20}
    assert pending.credit(chain(2)) == {}

    pending.end(leader)
    pending.end(leader)
    assert pending.credit(chain(1, 2)) == {}
    assert len(pending) == 0


def test_followers_do_not_lead_and_a_third_worker_never_does() -> None:
    pending = Pending()
    assert pending.lead("w0", chain(1, 2)) is not None
    assert pending.lead("w0", chain(1, 2)) is None
    assert pending.lead("w1", chain(1, 2)) is not None
    assert pending.lead("w2", chain(1, 2)) is None

    assert pending.credit(chain(1, 2)) == {"w0": 20, "w1": 20}


def test_prompts_with_less_than_half_in_common_lead_each_for_themselves() -> None:
    pending = Pending()
    assert pending.lead("w0", chain(1, 2, 3)) is not None
    assert pending.lead("w0", chain(1, 4, 5)) is not None
    assert len(pending) == 2
    assert pending.credit(chain(1, 4, 5)) == {"w0": 30}


def test_the_end_of_one_leader_leaves_the_other() -> None:
    pending = Pending()
    first, second = pending.lead("w0", chain(1, 2)), pending.lead("w1", chain(1, 2))
    assert first is not None
    assert second is not None
    pending.end(first)

    assert pending.credit(chain(1, 2)) == {"w1": 20}


def test_prompts_shorter_than_a_block_have_no_siblings() -> None:
    pending = Pending()

    assert pending.lead("w0", []) is None
    assert pending.credit([]) == {}


def test_many_cold_prompts_under_one_system_prompt_are_compared_up_to_a_bound() -> None:
    pending = Pending()
    for part in range(2, 2 + 2 * MAX_COMPARED):
        assert pending.lead("w0", chain(1, part, part)) is not None
    newest, oldest = 1 + 2 * MAX_COMPARED, 2

    assert pending.credit(chain(1, newest, newest)) == {"w0": 30}
    assert pending.credit(chain(1, oldest, oldest)) == {"w0": 10}
