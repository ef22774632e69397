"""The coordinator by hand: tiny numbers, plans and commands written out."""

import pytest

from memkv_pp.admission.coordinator import Coordinator, CoordinatorConfig
from memkv_pp.admission.ledger import Ledger
from memkv_pp.errors import ConfigError, InternalError, StageShortfall
from memkv_pp.fence import Fence
from memkv_pp.formats import parse_pair
from memkv_pp.geometry import uniform_geometry
from memkv_pp.sizing import CacheOptions, Footprint, size_fence
from memkv_pp.testing.fakes import FakeStages, Fault, FaultKind, fake_token, tiny_sizings
from memkv_pp.testing.stepped import SteppedPipeline
from memkv_pp.units import GIB
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
)

GREEDY = Sampling()


def make(*, stages=2, blocks=8, faults=(), **config):
    """A pipeline with ``blocks`` full records of four tokens on every stage."""
    sizings = tiny_sizings(stages)
    units = [Footprint(blocks, blocks if s.window else 0, 8 if s.state else 0) for s in sizings]
    knobs = {"waves": 2, "prefill_chunk": 4, "vocabulary_size": 1000, **config}
    coordinator = Coordinator(Ledger(sizings, units), CoordinatorConfig(**knobs))
    return SteppedPipeline(coordinator, FakeStages(sizings, units, faults))


def started(**knobs):
    pipeline = make(**knobs)
    pipeline.start()
    return pipeline


def arrived(request=1, prompt: int | tuple[int, ...] = 3, max_new=2, end_ids=()):
    if isinstance(prompt, int):
        prompt = tuple(range(10, 10 + prompt))
    return Arrived(
        Request(request=request, prompt=prompt, max_new=max_new, end_ids=frozenset(end_ids))
    )


def plans_in(commands):
    return [command.plan for command in commands if isinstance(command, SendPlan)]


def emits_in(commands):
    return [command for command in commands if isinstance(command, Emit)]


def answer_all(pipeline):
    """Every stage answers its next plan; the commands of the last one."""
    return [pipeline.answer(stage) for stage in pipeline.stages.answerable()][-1]


def drawn(request, first_position, count):
    return [fake_token(request, first_position + i) for i in range(count)]


def nothing_is_left(pipeline):
    statistics = pipeline.coordinator.ledger.statistics()
    assert statistics.held_bytes == (0,) * len(statistics.held_bytes)
    assert all(stage.used() == Footprint() for stage in pipeline.stages.stages)
    counts = pipeline.coordinator.statistics()
    assert (counts.live, counts.waiting, counts.in_flight) == (0, 0, 0)


# The life of a request


def test_the_life_of_a_request_plan_by_plan():
    pipeline = started()
    a, b = drawn(1, 2, 2)
    assert pipeline.handle(arrived(1, prompt=3, max_new=2)) == (
        Admit(1),
        SendPlan(Plan(0, (), (Opened(1, GREEDY),), (Rows(1, 0, 3, True),), (10, 11, 12))),
    )
    assert pipeline.answer(0) == ()
    assert pipeline.answer(1) == (
        Emit(1, a),
        SendPlan(Plan(1, (), (), (Rows(1, 3, 1, True),), (a,))),
    )
    assert pipeline.answer(0) == ()
    assert pipeline.answer(1) == (
        Emit(1, b),
        Emit(1, None, "length"),
        SendPlan(Plan(2, (1,), (), (), ())),
    )
    assert pipeline.answer(0) == ()
    assert pipeline.answer(1) == (Release(1),)
    nothing_is_left(pipeline)


def test_no_plan_is_sent_before_every_stage_is_ready():
    pipeline = make()
    assert pipeline.handle(arrived()) == (Admit(1),)
    assert pipeline.answer(0) == ()
    assert [plan.number for plan in plans_in(pipeline.answer(1))] == [0]


def test_a_token_is_released_only_when_the_last_stage_to_answer_has_answered():
    pipeline = started(stages=3)
    pipeline.handle(arrived())
    assert pipeline.answer(2) == ()
    assert pipeline.answer(0) == ()
    assert emits_in(pipeline.answer(1)) == [Emit(1, fake_token(1, 2))]


def test_an_end_token_ends_the_request_and_is_not_released():
    pipeline = started()
    a, b, end = drawn(1, 2, 3)
    pipeline.handle(arrived(1, prompt=3, max_new=9, end_ids=[end]))
    pipeline.drain()
    assert pipeline.tokens[1] == [a, b]
    assert pipeline.reason(1) == "stop"
    assert pipeline.released == [1]
    nothing_is_left(pipeline)


def test_the_last_token_of_a_request_is_not_fed_back():
    pipeline = started()
    pipeline.handle(arrived(1, prompt=3, max_new=3))
    pipeline.drain()
    a, b, _ = pipeline.tokens[1]
    assert pipeline.stages.stages[0].inputs[1] == [10, 11, 12, a, b]


# Waves and chunks


def test_at_most_waves_plans_are_in_flight_and_the_rest_wait_for_the_oldest():
    pipeline = started(waves=2)
    assert [len(plans_in(pipeline.handle(arrived(r)))) for r in (1, 2, 3)] == [1, 1, 0]
    pipeline.answer(0)
    pipeline.answer(0)
    assert pipeline.coordinator.statistics().in_flight == 2
    (plan,) = plans_in(pipeline.answer(1))
    assert plan.opened == (Opened(3, GREEDY),)


def test_prefill_chunks_of_one_sequence_occupy_consecutive_waves():
    pipeline = started(waves=3, prefill_chunk=4)
    sent = plans_in(pipeline.handle(arrived(1, prompt=11, max_new=1)))
    assert [plan.rows for plan in sent] == [
        (Rows(1, 0, 4, False),),
        (Rows(1, 4, 4, False),),
        (Rows(1, 8, 3, True),),
    ]
    assert [plan.tokens for plan in sent] == [
        (10, 11, 12, 13),
        (14, 15, 16, 17),
        (18, 19, 20),
    ]
    pipeline.drain()
    assert pipeline.tokens[1] == drawn(1, 10, 1)


def test_a_plan_takes_at_most_a_chunk_of_prompt_rows_over_all_its_sequences():
    pipeline = make(waves=1, prefill_chunk=4)
    for request in (1, 2, 3):
        pipeline.handle(arrived(request, prompt=3))
    pipeline.start()
    assert pipeline.plans[0].rows == (Rows(1, 0, 3, True), Rows(2, 0, 1, False))
    answer_all(pipeline)
    assert pipeline.plans[1].rows == (
        Rows(1, 3, 1, True),
        Rows(2, 1, 2, True),
        Rows(3, 0, 2, False),
    )


def test_a_long_prompt_does_not_hold_up_those_that_decode():
    pipeline = started(waves=2, prefill_chunk=2)
    pipeline.handle(arrived(1, prompt=1, max_new=4))
    pipeline.handle(arrived(2, prompt=8, max_new=1))
    pipeline.drain()
    order = [rows.sequence for plan in pipeline.plans for rows in plan.rows]
    assert order == [1, 2, 1, 2, 1, 2, 1, 2]


def test_no_more_sequences_are_admitted_at_once_than_the_stages_have_slots_for():
    pipeline = started(max_sequences=2)
    for request in (1, 2, 3):
        pipeline.handle(arrived(request, prompt=1, max_new=1))
    assert pipeline.coordinator.statistics().live == 2
    pipeline.drain()
    assert sorted(pipeline.tokens) == [1, 2, 3]
    nothing_is_left(pipeline)


def test_live_sequences_are_shared_out_evenly_over_the_waves():
    pipeline = make(waves=2, prefill_chunk=64)
    for request in (1, 2, 3, 4):
        pipeline.handle(arrived(request))
    pipeline.start()
    assert [[rows.sequence for rows in plan.rows] for plan in pipeline.plans] == [[1, 2], [3, 4]]


def test_a_decoding_sequence_is_in_one_plan_at_a_time():
    pipeline = started(waves=3)
    pipeline.handle(arrived(1, max_new=5))
    assert len(pipeline.plans) == 1
    answer_all(pipeline)
    assert len(pipeline.plans) == 2


# Waiting


def test_a_request_that_does_not_fit_now_waits_and_enters_when_there_is_room():
    pipeline = started(blocks=2)
    pipeline.handle(arrived(1, prompt=5, max_new=1))
    assert pipeline.handle(arrived(2, prompt=2, max_new=1)) == (
        Wait(
            2,
            (
                StageShortfall(stage=0, have_bytes=0, need_bytes=256),
                StageShortfall(stage=1, have_bytes=0, need_bytes=512),
            ),
        ),
    )
    answer_all(pipeline)
    commands = answer_all(pipeline)
    assert Admit(2) in commands
    # Sequence 1 closes first thing in the plan that opens sequence 2.
    (plan,) = plans_in(commands)
    assert (plan.closed, plan.opened) == ((1,), (Opened(2, GREEDY),))
    pipeline.drain()
    assert pipeline.reason(2) == "length"
    nothing_is_left(pipeline)


def test_waiting_requests_enter_in_order_even_if_a_later_one_would_fit():
    pipeline = started(blocks=3)
    pipeline.handle(arrived(1, prompt=8, max_new=1))
    assert isinstance(pipeline.handle(arrived(2, prompt=8, max_new=1))[0], Wait)
    assert pipeline.handle(arrived(3, prompt=2, max_new=1)) == (Wait(3, ()),)
    assert pipeline.coordinator.statistics().waiting == 2
    pipeline.drain()
    admitted = [c.request for _, _, commands in pipeline.log for c in commands if type(c) is Admit]
    assert admitted == [1, 2, 3]
    nothing_is_left(pipeline)


# Cancelling


def test_cancelling_a_waiting_request_ends_and_releases_it_at_once():
    pipeline = started(blocks=1)
    pipeline.handle(arrived(1))
    pipeline.handle(arrived(2))
    assert pipeline.handle(Cancelled(2)) == (Emit(2, None, "cancelled"), Release(2))


def test_cancelling_the_head_of_the_queue_lets_those_behind_it_in():
    pipeline = started(blocks=3)
    pipeline.handle(arrived(1, prompt=8, max_new=1))
    pipeline.handle(arrived(2, prompt=8, max_new=1))
    pipeline.handle(arrived(3, prompt=2, max_new=1))
    assert pipeline.handle(Cancelled(2))[:3] == (
        Emit(2, None, "cancelled"),
        Release(2),
        Admit(3),
    )


def test_cancelling_before_the_first_plan_opens_nothing_on_any_stage():
    pipeline = make()
    pipeline.handle(arrived(1))
    assert pipeline.handle(Cancelled(1)) == (Emit(1, None, "cancelled"),)
    pipeline.answer(0)
    assert pipeline.answer(1) == (Release(1),)
    assert pipeline.plans == []
    nothing_is_left(pipeline)


def test_cancelling_in_flight_closes_with_the_next_plan_and_drops_the_token():
    pipeline = started(waves=2)
    pipeline.handle(arrived(1))
    assert pipeline.handle(Cancelled(1)) == (
        Emit(1, None, "cancelled"),
        SendPlan(Plan(1, (1,), (), (), ())),
    )
    pipeline.drain()
    assert 1 not in pipeline.tokens
    assert pipeline.released == [1]
    nothing_is_left(pipeline)


def test_an_admitted_request_that_no_plan_has_opened_is_released_when_the_next_plan_forms():
    pipeline = started(waves=1)
    pipeline.handle(arrived(1, max_new=5))
    pipeline.handle(arrived(2, max_new=5))
    pipeline.handle(Cancelled(2))
    assert pipeline.plans[-1].number == 0
    commands = answer_all(pipeline)
    assert pipeline.released == [2]
    assert plans_in(commands)[0].closed == ()
    pipeline.drain()
    assert pipeline.tokens[1] == drawn(1, 2, 5)


def test_cancelling_what_is_finished_or_unknown_changes_nothing():
    pipeline = started()
    pipeline.handle(arrived(1))
    pipeline.drain()
    assert pipeline.handle(Cancelled(1)) == ()
    assert pipeline.handle(Cancelled(99)) == ()


def test_cancelling_twice_ends_once():
    pipeline = started()
    pipeline.handle(arrived(1))
    pipeline.handle(Cancelled(1))
    assert pipeline.handle(Cancelled(1)) == ()
    pipeline.drain()
    nothing_is_left(pipeline)


def test_a_request_may_not_arrive_again_until_it_is_released():
    pipeline = started(waves=2)
    pipeline.handle(arrived(1))
    pipeline.handle(Cancelled(1))
    with pytest.raises(InternalError, match="request 1 arrived twice"):
        pipeline.coordinator.handle(arrived(1), 0.0)
    pipeline.drain()
    assert pipeline.coordinator.handle(arrived(1), 0.0)[0] == Admit(1)


# Refusals


@pytest.mark.parametrize(
    ("event", "reason", "message"),
    [
        (arrived(prompt=()), "empty_prompt", "no tokens"),
        (arrived(max_new=0), "max_new", "--max-new: 0 is below 1"),
        (arrived(max_new=-4), "max_new", "--max-new: -4 is below 1"),
        (arrived(prompt=(1, 1000)), "token", "not in [0, 1000)"),
        (arrived(prompt=(-1,)), "token", "not in [0, 1000)"),
        (arrived(prompt=20, max_new=2), "context", "21 rows, the context holds 20"),
        (arrived(prompt=17, max_new=1), "capacity", "17 rows do not fit"),
    ],
)
def test_what_can_never_be_served_is_refused_at_submit(event, reason, message):
    pipeline = started(blocks=4, context_tokens=20)
    (refusal,) = pipeline.handle(event)
    assert isinstance(refusal, Refuse)
    assert refusal.reason == reason
    assert message in refusal.message
    assert pipeline.coordinator.statistics().refused == 1
    assert pipeline.handle(arrived(2, prompt=16, max_new=1))[0] == Admit(2)


def test_r1_a_shortfall_names_every_stage_with_what_it_has_and_needs():
    # 48 layers of 4 KV heads of 128 in f16 on [0, 16, 48]: 32,768 and 65,536 B per token.
    geometry = uniform_geometry(48, kv_heads=4, head_size=128)
    sizings = size_fence(geometry, (parse_pair("f16"),) * 48, Fence((0, 16, 48)), CacheOptions())
    budgets = (int(3.18 * GIB), 8 * GIB)
    units = [s.units_within(budget, 1) for s, budget in zip(sizings, budgets, strict=True)]
    assert [u.full_records * 16 for u in units] == [104_192, 131_072]
    coordinator = Coordinator(Ledger(sizings, units), CoordinatorConfig(waves=3))
    (refusal,) = coordinator.handle(arrived(1, prompt=(1,) * 262_144, max_new=1), 0.0)
    assert isinstance(refusal, Refuse)
    assert refusal.stages == (
        StageShortfall(stage=0, have_bytes=104_192 * 32_768, need_bytes=8 * GIB),
        StageShortfall(stage=1, have_bytes=8 * GIB, need_bytes=16 * GIB),
    )
    assert refusal.message == (
        "262144 rows do not fit:"
        " stage 0 has 3414163456 (3.18 GiB), needs 8589934592 (8.00 GiB);"
        " stage 1 has 8589934592 (8.00 GiB), needs 17179869184 (16.00 GiB)"
    )
    assert coordinator.handle(arrived(2, prompt=(1,) * 104_192, max_new=1), 0.0) == (Admit(2),)


@pytest.mark.parametrize("knob", ["waves", "prefill_chunk"])
def test_a_pipeline_needs_a_wave_and_a_row_per_chunk(knob):
    with pytest.raises(ConfigError, match=f"--{knob.replace('_', '-')}: 0 is below 1"):
        make(**{knob: 0})


# Stages that break


def test_a_lost_stage_fails_every_request_and_returns_everything():
    pipeline = started(blocks=4, waves=2)
    pipeline.handle(arrived(1, prompt=5, max_new=3))
    pipeline.handle(arrived(2, prompt=3, max_new=2))
    pipeline.handle(arrived(3, prompt=9, max_new=1))
    pipeline.handle(Cancelled(2))
    error = ("StageLost", "stage 1 was killed")
    pipeline.stages.lose(1)
    commands = pipeline.answer(1)
    assert emits_in(commands) == [Emit(1, None, "error", error), Emit(3, None, "error", error)]
    assert sorted(pipeline.released) == [1, 2, 3]
    statistics = pipeline.coordinator.statistics()
    assert (statistics.live, statistics.waiting, statistics.in_flight) == (0, 0, 0)
    assert pipeline.coordinator.ledger.statistics().held_bytes == (0, 0)
    (refusal,) = pipeline.handle(arrived(4))
    assert isinstance(refusal, Refuse)
    assert (refusal.reason, refusal.message) == ("stage_lost", "stage 1 was killed")
    pipeline.drain()
    assert pipeline.handle(StageLost(0, "later")) == ()


def test_a_request_whose_close_is_in_flight_is_released_once_when_a_stage_is_lost():
    pipeline = started()
    pipeline.handle(arrived(1, max_new=1))
    answer_all(pipeline)
    assert pipeline.plans[-1].closed == (1,)
    pipeline.stages.lose(0)
    assert pipeline.answer(0) == (Release(1),)
    assert pipeline.reason(1) == "length"


def test_a_stage_lost_while_loading_fails_those_that_arrived_before():
    pipeline = make()
    pipeline.handle(arrived(1))
    pipeline.stages.lose(0, "no such file", "ModelError")
    assert pipeline.answer(0) == (
        Emit(1, None, "error", ("ModelError", "no such file")),
        Release(1),
    )
    assert pipeline.answer(1) == ()


def test_a_wrong_length_fails_that_sequence_alone_and_the_rest_go_on():
    # Plan 1 holds sequence 2 alone; stage 0 keeps a block too many of it until it closes.
    fault = Fault(kind=FaultKind.LENGTH, stage=0, plan=1)
    pipeline = started(waves=3, blocks=8, faults=[fault])
    for request in (1, 2, 3):
        pipeline.handle(arrived(request, prompt=3, max_new=4))
    pipeline.drain()
    ending = pipeline.endings[2]
    assert isinstance(ending, Emit)
    assert ending.error == (
        "DigestMismatch",
        "stage 0 holds 7 rows of sequence 2 after plan 1, the ledger expects 3",
    )
    assert 2 not in pipeline.tokens
    for request in (1, 3):
        assert pipeline.reason(request) == "length"
        assert pipeline.tokens[request] == drawn(request, 2, 4)
    assert pipeline.coordinator.lost is None
    nothing_is_left(pipeline)


@pytest.mark.parametrize("eager", [0, 1])
def test_plans_in_flight_while_a_suspect_closes_do_not_end_the_pipeline(eager):
    # Plan 1 is in flight when the plan that closes the suspect of plan 0 is formed.
    fault = Fault(kind=FaultKind.LENGTH, stage=0, plan=0)
    pipeline = started(waves=2, blocks=8, faults=[fault])
    pipeline.handle(arrived(1, prompt=3, max_new=4))
    pipeline.handle(arrived(2, prompt=3, max_new=4))
    pipeline.drain(lambda answerable: eager if eager in answerable else answerable[0])
    assert pipeline.reason(1) == "error"
    assert pipeline.reason(2) == "length"
    nothing_is_left(pipeline)


def test_bytes_are_compared_again_once_a_suspect_is_closed():
    length = Fault(kind=FaultKind.LENGTH, stage=0, plan=0)
    later = Fault(kind=FaultKind.BYTES, stage=0, plan=5)
    pipeline = started(waves=1, faults=[length, later])
    pipeline.handle(arrived(1, prompt=3, max_new=2))
    pipeline.handle(arrived(2, prompt=3, max_new=20))
    pipeline.drain()
    assert pipeline.reason(1) == "error"
    assert pipeline.coordinator.lost is not None
    assert "after plan 5" in pipeline.coordinator.lost.message


def test_wrong_bytes_end_the_pipeline_with_a_digest_mismatch():
    fault = Fault(kind=FaultKind.BYTES, stage=1, plan=1)
    pipeline = started(faults=[fault])
    pipeline.handle(arrived(1, max_new=5))
    pipeline.drain()
    message = (
        "stage 1 holds PoolBytes(full=513, window=0, state=0) in 1 sequences after plan 1,"
        " the ledger expects PoolBytes(full=512, window=0, state=0) in 1"
    )
    assert pipeline.coordinator.lost == StageLost(1, message, "DigestMismatch")
    assert pipeline.endings[1] == Emit(1, None, "error", ("DigestMismatch", message))
    assert pipeline.tokens[1] == drawn(1, 2, 1)


def test_an_answer_for_another_number_of_sequences_ends_the_pipeline():
    pipeline = started()
    pipeline.handle(arrived(1))
    commands = pipeline.handle(StepDone(0, 0, (3, 3), PoolBytes(256, 0, 0), 1))
    error = ("DigestMismatch", "stage 0 answered for 2 sequences, 1 were asked")
    assert emits_in(commands) == [Emit(1, None, "error", error)]


def test_an_answer_with_a_sequence_too_many_ends_the_pipeline():
    pipeline = started()
    pipeline.handle(arrived(1))
    pipeline.handle(StepDone(0, 0, (3,), PoolBytes(256, 0, 0), 2))
    assert pipeline.coordinator.lost is not None
    assert pipeline.coordinator.lost.kind == "DigestMismatch"
    assert "in 2 sequences after plan 0" in pipeline.coordinator.lost.message


def test_a_plan_that_is_not_answered_in_time_means_the_stage_is_lost():
    pipeline = started(plan_deadline_s=5.0)
    pipeline.handle(arrived(1), now=10.0)
    pipeline.answer(0, now=11.0)
    assert pipeline.handle(Tick(), now=15.0) == ()
    commands = pipeline.handle(Tick(), now=15.1)
    assert emits_in(commands) == [
        Emit(
            1, None, "error", ("StageLost", "stage 1 has not answered plan 0 within 5 s")
        )
    ]  # fmt: skip
    assert pipeline.released == [1]
    pipeline.drain()


def test_an_answer_that_comes_twice_is_our_bug():
    fault = Fault(kind=FaultKind.REPEAT, stage=0, plan=0)
    pipeline = started(faults=[fault])
    pipeline.handle(arrived(1))
    pipeline.answer(0)
    with pytest.raises(InternalError, match="stage 0 answered plan 0, which is not in flight"):
        pipeline.answer(0)


def test_an_answer_to_a_plan_that_was_never_sent_is_our_bug():
    pipeline = started()
    with pytest.raises(InternalError, match="stage 0 answered plan 3, which is not in flight"):
        pipeline.handle(StepDone(0, 3, (), PoolBytes(0, 0, 0), 0))


def test_too_few_tokens_end_the_pipeline_as_a_digest_that_differs():
    fault = Fault(kind=FaultKind.TOKENS, stage=1, plan=0)
    pipeline = started(faults=[fault])
    pipeline.handle(arrived(1))
    pipeline.answer(0)
    (failed, released) = pipeline.answer(1)
    assert isinstance(failed, Emit)
    assert failed.error is not None
    assert failed.error[0] == "DigestMismatch"
    assert "stage 1 drew 0 tokens in plan 0, 1 were asked" in failed.error[1]
    assert released == Release(1)


def test_a_sequence_whose_logits_are_nan_fails_alone():
    pipeline = make(faults=[Fault(kind=FaultKind.NAN, stage=1, plan=0)], waves=1)
    for request in (1, 2):
        pipeline.handle(arrived(request, prompt=2))
    pipeline.start()
    pipeline.drain()
    failed = pipeline.endings[1]
    assert isinstance(failed, Emit)
    assert failed.error == ("NoTokenError", "the logits after row 1 are NaN")
    assert pipeline.tokens[2] == drawn(2, 1, 2)
    nothing_is_left(pipeline)


def test_an_arena_of_other_bytes_than_the_ledger_promises_tells_the_equation():
    pipeline = make(faults=[Fault(kind=FaultKind.ALLOCATED, stage=1)])
    pipeline.answer(0)
    with pytest.raises(
        InternalError,
        match="stage 1: sized 4096 == allocated 4097 == promised 4096 does not hold",
    ):
        pipeline.answer(1)


def test_a_stage_may_announce_itself_again_without_effect():
    pipeline = started()
    allocated = pipeline.stages.stages[0].ready().allocated_bytes
    assert pipeline.handle(StageReady(0, allocated)) == ()


# check()


def test_check_finds_a_charge_that_no_request_holds():
    pipeline = started()
    pipeline.handle(arrived(1))
    pipeline.coordinator.ledger.charge(9, 4)
    with pytest.raises(InternalError, match=r"charged requests 2 != live 1 \+ closing 0"):
        pipeline.coordinator.check()


def test_check_finds_a_stage_that_uses_more_than_its_requests_hold():
    pipeline = started()
    pipeline.handle(arrived(1))
    pipeline.coordinator._expected.used[1] = Footprint(3, 0, 0)
    with pytest.raises(InternalError, match=r"stage 1: used .*=3.* > held .*=1"):
        pipeline.coordinator.check()


def test_check_finds_a_sequence_that_is_live_and_closing():
    pipeline = started()
    pipeline.handle(arrived(1))
    pipeline.coordinator._closing.append(1)
    with pytest.raises(InternalError, match=r"both live and closing: \[1, 1\]"):
        pipeline.coordinator.check()
