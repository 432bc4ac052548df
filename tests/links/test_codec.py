"""Messages as bytes: every type comes back as it was, and bytes that are none are an error, never anything else."""

import contextlib
import dataclasses
import pickle
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as array_strategies

from workers.errors import LinkError
from workers.links.codec import decode_answer, decode_request, encode_answer, encode_failure, encode_request
from workers.messages import (
    NO_PROPOSAL,
    DraftAheadResponse,
    Proposal,
    ProposedItem,
    ProposeResponse,
    ReleaseRequest,
    StatsRequest,
    VerifyItem,
    VerifyRequest,
    WorkerRequest,
    WorkerResponse,
    WorkerStats,
    token_ids,
)


def _arrays(declared: Any) -> st.SearchStrategy[Any]:
    (scalar,) = get_args(get_args(declared)[1])
    shapes = array_strategies.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=5)
    return array_strategies.arrays(np.dtype(scalar), shapes)


st.register_type_strategy(np.ndarray, _arrays)
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
REQUESTS = st.one_of(*map(st.from_type, get_args(WorkerRequest)))
RESPONSES = st.one_of(st.none(), *map(st.from_type, get_args(WorkerResponse)))


def same(one: Any, other: Any) -> bool:
    """Whether both are the same value of the same types, all the way down; NaN equals itself."""
    if type(one) is not type(other):
        return False
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, entry.name), getattr(other, entry.name)) for entry in dataclasses.fields(one))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other or (one != one and other != other))


@settings(max_examples=60)
@given(REQUESTS)
def test_every_request_comes_back_as_it_was(message: WorkerRequest) -> None:
    request = decode_request(encode_request(3, 5, message))
    assert (request.link, request.number) == (3, 5)
    assert same(request.message(), message)


@settings(max_examples=60)
@given(RESPONSES)
def test_every_answer_comes_back_as_it_was(response: WorkerResponse | None) -> None:
    answer = decode_answer(encode_answer(5, response))
    assert answer.number == 5
    assert same(answer.result(), response)


def test_every_kind_of_message_has_a_name_of_its_own() -> None:
    kinds = [kind.__name__ for kind in (*get_args(WorkerRequest), *get_args(WorkerResponse))]
    assert len(set(kinds)) == len(kinds) >= 9


@pytest.mark.parametrize("layout", [np.arange(12, dtype=np.int32)[::3], np.zeros((3, 4), np.int32).T, np.int32([])])
def test_arrays_of_any_layout_arrive_with_their_numbers(layout: Any) -> None:
    message = VerifyRequest((VerifyItem(1, 2, 3, layout),))
    read = decode_request(encode_request(1, 1, message)).message()
    assert isinstance(read, VerifyRequest)
    np.testing.assert_array_equal(read.items[0].committed, layout)


def test_numpy_scalars_arrive_as_numbers() -> None:
    response: Any = WorkerStats(np.int64(3), np.int32(4), 5)
    assert same(decode_answer(encode_answer(1, response)).result(), WorkerStats(3, 4, 5))


@pytest.mark.parametrize("wrong", [np.zeros(3, np.int64), np.zeros(3, object), np.zeros((1, 1, 1), np.int32), {1}, "x"])
def test_what_is_not_declared_is_not_sent_or_not_read(wrong: Any) -> None:
    response = ProposeResponse((ProposedItem(1, 1, Proposal(wrong)),), 1.0)
    with pytest.raises(LinkError):
        decode_answer(encode_answer(1, response)).result()


def test_floats_where_token_ids_belong_are_refused() -> None:
    response = ProposeResponse((ProposedItem(1, 1, Proposal(np.zeros(3, np.float32))),), 1.0)  # type: ignore[arg-type]
    with pytest.raises(LinkError, match="int32"):
        decode_answer(encode_answer(1, response)).result()


def test_answers_are_not_taken_for_requests() -> None:
    with pytest.raises(LinkError, match="WorkerStats"):
        encode_request(1, 1, WorkerStats(1, 1, 1))  # type: ignore[arg-type]
    with pytest.raises(LinkError, match="StatsRequest"):
        encode_answer(1, StatsRequest())  # type: ignore[arg-type]


def test_a_failure_keeps_its_words_even_if_they_are_no_unicode() -> None:
    with pytest.raises(LinkError, match=r"^the worker failed: broken \\udc80$"):
        decode_answer(encode_failure(1, "broken \udc80")).result()


def test_text_that_is_no_unicode_is_refused_by_name() -> None:
    item = VerifyItem(1, 1, 0, token_ids([1]), cache_salt="\udc80")
    with pytest.raises(LinkError, match="VerifyRequest cannot be sent"):
        encode_request(1, 1, VerifyRequest((item,)))


def committing(tokens: Any) -> dict[str, Any]:
    """The body of a verification whose committed tokens are these."""
    return {"items": [{"sequence_id": 1, "epoch": 1, "first_position": 0, "committed": tokens}]}


MALFORMED = {
    "nothing": b"",
    "text": b"hello",
    "a pickle": pickle.dumps(StatsRequest()),
    "an endless array": b"\xdd\xff\xff\xff\xff",
    "deep nesting": b"\x91" * 200_000,
    "another envelope": msgspec.msgpack.encode((1, "StatsRequest")),
    "another number": msgspec.msgpack.encode((1, "one", "StatsRequest", {})),
}
UNREADABLE = {
    "an unknown type": ("SystemRequest", {}),
    "a type of the other direction": ("WorkerStats", {"sequences": 1, "free_blocks": 1, "total_blocks": 1}),
    "a missing field": ("ProposeRequest", {}),
    "a wrong field": ("ReleaseRequest", {"sequence_ids": "all"}),
    "an unknown extension": ("VerifyRequest", committing(msgspec.msgpack.Ext(9, b""))),
    "no array": ("VerifyRequest", committing([1, 2])),
    "half a number": ("VerifyRequest", committing(msgspec.msgpack.Ext(1, b"123"))),
    "an array without its shape": ("VerifyRequest", committing(msgspec.msgpack.Ext(3, b"1"))),
    "another shape": ("VerifyRequest", committing(msgspec.msgpack.Ext(3, b"\xff" * 12))),
}


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED.keys())
def test_bytes_that_are_no_message_are_an_error(frame: bytes) -> None:
    for decode in (decode_request, decode_answer):
        with pytest.raises(LinkError, match="not a message"):
            decode(frame)


@pytest.mark.parametrize(("kind", "body"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_message_that_cannot_be_read_keeps_its_number(kind: str, body: Any) -> None:
    request = decode_request(msgspec.msgpack.encode((1, 42, kind, body)))
    assert request.number == 42
    with pytest.raises(LinkError, match=r"unknown message|cannot be read"):
        request.message()


@given(st.binary(max_size=200))
def test_random_bytes_are_read_or_refused(body: bytes) -> None:
    for frame in (body, b"\x94\x01\x01\xaeProposeRequest" + body):
        with contextlib.suppress(LinkError):
            decode_request(frame).message()


def test_the_wire_format_of_a_simple_message_stays() -> None:
    assert msgspec.msgpack.decode(encode_request(9, 2, ReleaseRequest((7,)))) == [
        *(9, 2, "ReleaseRequest"),
        {"sequence_ids": [7]},
    ]
    assert same(decode_answer(encode_answer(1, DraftAheadResponse((), 0.0))).result(), DraftAheadResponse((), 0.0))
    assert len(NO_PROPOSAL) == 0
