"""The block ledger: exact promises, and a rule of admission that leaves room to grow."""

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.router.ledger import HEADROOM_BLOCKS, BlockLedger

operations = st.lists(
    st.tuples(
        st.sampled_from(["admit", "extend", "release"]),
        st.integers(0, 5),
        st.integers(1, 60),
        st.integers(0, 8),
    ),
    max_size=60,
)


@given(total=st.integers(1, 30), block_tokens=st.sampled_from([1, 4, 16]), operations=operations)
@settings(max_examples=300)
def test_promises_never_exceed_the_blocks_and_all_come_back(
    total: int, block_tokens: int, operations: list[tuple[str, int, int, int]]
) -> None:
    ledger = BlockLedger(total, block_tokens)
    for operation, sequence_id, tokens, extra in operations:
        known = ledger.reserved.get(sequence_id)
        if operation == "release":
            ledger.release(sequence_id)
        elif operation == "admit" and known is None:
            admitted = ledger.admit(sequence_id, tokens, tokens + extra)
            assert admitted is (sequence_id in ledger.reserved)
        elif operation == "extend" and known is not None:
            free = ledger.free_blocks
            granted = ledger.extend(sequence_id, tokens, extra)
            blocks = ledger.reserved[sequence_id].blocks
            if granted is None:
                assert blocks == known.blocks
                assert ledger.blocks_for(tokens) > known.blocks + free
            else:
                assert blocks * block_tokens >= tokens + granted
                assert blocks >= known.blocks
                # No draft is refused that would have fitted.
                assert granted == extra or ledger.blocks_for(tokens + granted + 1) > known.blocks + free
        promised = sum(promise.blocks for promise in ledger.reserved.values())
        assert ledger.free_blocks == total - promised >= 0
    for sequence_id in range(6):
        ledger.release(sequence_id)
    assert ledger.free_blocks == total


def test_a_new_sequence_needs_its_tokens_and_room_for_everybody_to_grow() -> None:
    ledger = BlockLedger(total_blocks=10, block_tokens=4)
    assert ledger.admit(1, tokens=8, most_tokens=100)  # 2 blocks, and 2 to grow
    assert ledger.free_blocks == 8
    assert not ledger.admit(2, tokens=20, most_tokens=100)  # 5, and 2 to grow for each
    assert ledger.free_blocks == 8
    assert ledger.admit(2, tokens=16, most_tokens=100)
    assert ledger.free_blocks == 2 * HEADROOM_BLOCKS


def test_a_sequence_near_its_end_needs_little_room_to_grow() -> None:
    ledger = BlockLedger(total_blocks=10, block_tokens=4)
    assert ledger.admit(1, tokens=20, most_tokens=20)
    assert ledger.admit(2, tokens=16, most_tokens=20)
    assert ledger.free_blocks == 1


def test_a_sequence_that_fits_the_pool_alone_is_always_admitted_to_an_empty_one() -> None:
    for most in range(1, 41):
        for tokens in range(1, most + 1):
            ledger = BlockLedger(total_blocks=10, block_tokens=4)
            assert ledger.could_hold(most)
            assert ledger.admit(1, tokens, most)
    assert not BlockLedger(total_blocks=10, block_tokens=4).could_hold(41)
