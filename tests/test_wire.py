import dataclasses
import json
import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_pp import wire
from memkv_pp.errors import ConfigError, InternalError, StageShortfall
from memkv_pp.wire import (
    Admit,
    Arrived,
    Cancelled,
    Emit,
    Opened,
    Plan,
    PoolBytes,
    Refuse,
    Release,
    Request,
    Rows,
    Sampling,
    SendPlan,
    StageLost,
    StageReady,
    StepDone,
    Tick,
    Wait,
    decode_done,
    decode_event,
    decode_plan,
    encode_done,
    encode_event,
    encode_plan,
)

INT64 = st.integers(-(2**63), 2**63 - 1)
COUNTS = st.integers(0, 2**62)
FLOATS = st.floats(allow_nan=False)
SAMPLINGS = st.builds(
    Sampling, temperature=FLOATS, top_p=FLOATS, seed=INT64, prompt_index=COUNTS
)  # fmt: skip
PLANS = st.builds(
    Plan,
    COUNTS,
    st.lists(COUNTS, max_size=4).map(tuple),
    st.lists(st.builds(Opened, COUNTS, SAMPLINGS), max_size=3).map(tuple),
    st.lists(st.builds(Rows, COUNTS, COUNTS, COUNTS, st.booleans()), max_size=4).map(tuple),
    st.lists(INT64, max_size=9).map(tuple),
)
DONES = st.builds(
    StepDone,
    COUNTS,
    COUNTS,
    st.lists(COUNTS, max_size=5).map(tuple),
    st.builds(PoolBytes, COUNTS, COUNTS, COUNTS),
    COUNTS,
    st.lists(INT64, max_size=5).map(tuple),
    COUNTS,
)
ANSWERS = st.one_of(
    DONES,
    st.builds(StageReady, COUNTS, COUNTS),
    st.builds(StageLost, COUNTS, st.text(), st.text()),
)

PLAN = Plan(7, (1,), (Opened(2, Sampling(seed=3)),), (Rows(2, 0, 2, True),), (5, 6))
DONE = StepDone(1, 7, (2,), PoolBytes(256, 0, 0), 1, (9,), 1000)
SHORT = (StageShortfall(stage=0, have_bytes=1, need_bytes=2),)
REQUEST = Request(request=1, prompt=(1, 2), max_new=3, end_ids=frozenset({4}))
MESSAGES = (
    Arrived(REQUEST),
    StageReady(0, 512),
    DONE,
    StageLost(1, "gone"),
    Cancelled(1),
    Tick(),
    Admit(1),
    Wait(1, SHORT),
    Refuse(1, "capacity", "too long", "shorten it", SHORT),
    SendPlan(PLAN),
    Emit(1, None, "error", ("StageLost", "gone")),
    Release(1),
)


@pytest.mark.slow
@given(PLANS)
def test_a_plan_comes_back_from_the_wire_as_it_was(plan):
    assert decode_plan(encode_plan(plan)) == plan
    assert decode_plan(memoryview(encode_plan(plan))) == plan


@pytest.mark.slow
@given(ANSWERS)
def test_an_answer_comes_back_from_the_wire_as_it_was(event):
    assert decode_event(encode_event(event)) == event


def test_a_plan_is_a_header_and_columns_of_little_endian_int64():
    number_and_counts = (7, 1, 1, 1, 2)
    opened = (2, 3, 0, 0, struct.unpack("<q", struct.pack("<d", 1.0))[0])
    columns = (1, *opened, 2, 0, 2, 1, 5, 6)
    words = struct.pack(f"<{5 + len(columns)}q", *number_and_counts, *columns)
    assert encode_plan(PLAN) == b"MKVPLN1\0" + words


def refuses_or_answers(decode, data):
    """Damage is an InternalError, or by chance another valid message; nothing else."""
    try:
        return decode(data)
    except InternalError:
        return None


@pytest.mark.slow
@given(PLANS, st.data())
def test_a_truncated_plan_is_refused(plan, data):
    whole = encode_plan(plan)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(InternalError):
        decode_plan(whole[:cut])


@pytest.mark.slow
@given(DONES, st.data())
def test_a_truncated_result_is_refused(done, data):
    whole = encode_done(done)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(InternalError):
        decode_done(whole[:cut])


@pytest.mark.slow
@given(PLANS, st.data())
def test_a_plan_with_flipped_bits_is_refused_or_is_another_plan(plan, data):
    damaged = bytearray(encode_plan(plan))
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    found = refuses_or_answers(decode_plan, bytes(damaged))
    assert found is None or isinstance(found, Plan)


@pytest.mark.slow
@given(ANSWERS, st.data())
def test_an_answer_with_flipped_bits_is_refused_or_is_another_answer(event, data):
    damaged = bytearray(encode_event(event))
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    refuses_or_answers(decode_event, bytes(damaged))


@pytest.mark.slow
@given(ANSWERS, st.data())
def test_a_truncated_answer_never_raises_anything_but_internal_error(event, data):
    whole = encode_event(event)
    refuses_or_answers(decode_event, whole[: data.draw(st.integers(0, len(whole)))])


@given(st.sampled_from([b"", b"D", b"R", b"L", b"X"]), st.binary(max_size=96))
def test_noise_is_refused(kind, body):
    refuses_or_answers(decode_event, kind + body)
    refuses_or_answers(decode_plan, body)
    refuses_or_answers(decode_done, body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"[1, 2]",
        b"{}",
        b"7",
        b"[" * 100_000,
        b'["one", "message", "kind"]',
        b'[Infinity, "message", "kind"]',
        b'[1, null, "kind"]',
    ],
)
def test_a_damaged_last_message_of_a_stage_is_an_internal_error(body):
    with pytest.raises(InternalError, match="damaged"):
        decode_event(b"L" + body)


def test_a_count_that_overflows_the_columns_is_refused():
    words = struct.pack("<5q", 7, 2**62, 0, 0, 0)
    with pytest.raises(InternalError, match="do not hold"):
        decode_plan(b"MKVPLN1\0" + words)
    words = struct.pack("<5q", 7, -1, 0, 1, -3)
    with pytest.raises(InternalError, match="do not hold"):
        decode_plan(b"MKVPLN1\0" + words)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_a_seed_that_no_plan_can_carry_is_refused_by_its_knob(seed):
    with pytest.raises(ConfigError, match="--seed"):
        Sampling(seed=seed)


def test_a_plan_is_no_result_and_a_result_no_plan():
    with pytest.raises(InternalError, match="header is damaged"):
        decode_plan(encode_done(DONE))
    with pytest.raises(InternalError, match="header is damaged"):
        decode_done(encode_plan(PLAN) + bytes(64))


def test_a_lost_stage_travels_as_json_of_its_three_fields():
    assert json.loads(encode_event(StageLost(2, "gone", "OutOfRecords"))[1:]) == [
        2,
        "gone",
        "OutOfRecords",
    ]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_event_and_command_is_frozen_hashable_and_pickles(message):
    assert pickle.loads(pickle.dumps(message)) == message
    hash(message)
    for field in dataclasses.fields(message):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(message, field.name, None)


def test_the_list_of_messages_above_is_complete():
    assert {type(message) for message in MESSAGES} == set(
        wire.Event.__args__ + wire.Command.__args__
    )
