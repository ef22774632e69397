"""One checker judges every kind of stages, and the checker itself is judged by planted faults."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from memkv_pp.config import PipelineConfig, units_for_rows
from memkv_pp.errors import PlanOrderError
from memkv_pp.fence import Fence
from memkv_pp.formats import parse_pair
from memkv_pp.model.metadata import open_geometry
from memkv_pp.serve.local import LocalStages
from memkv_pp.sizing import CacheOptions, Footprint, size_fence
from memkv_pp.testing.conformance import check_stage_port, conformance_plans
from memkv_pp.testing.fakes import FakePort, FakeStages, Fault, FaultKind, tiny_sizings
from memkv_pp.wire import Plan, StageLost, StepDone

SEQUENCE_ROWS = (8, 4, 4)


def last_stage(answerable):
    return answerable[-1]


def fake_pipeline(num_stages=3, faults=(), port_class=FakePort, **options):
    sizings = tiny_sizings(num_stages)
    units = units_for_rows(sizings, SEQUENCE_ROWS)

    @asynccontextmanager
    async def make():
        yield port_class(FakeStages(sizings, units, faults), **options), sizings, units

    return make


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("choose", [min, last_stage])
def test_fake_stages_keep_the_contract(num_stages, choose):
    asyncio.run(check_stage_port(fake_pipeline(num_stages, choose=choose)))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(kind=FaultKind.ALLOCATED, stage=1), r"stage 1: allocated \d+ != sized \d+"),
        (Fault(kind=FaultKind.LENGTH, stage=1, plan=4), "stage 1, plan 4: .lengths, used"),
        (Fault(kind=FaultKind.BYTES, stage=0, plan=3), "stage 0, plan 3: .lengths, used"),
        (Fault(kind=FaultKind.TOKENS, stage=2, plan=1), "stage 2, plan 1: .lengths, used"),
        (Fault(kind=FaultKind.LOST, stage=1, plan=2), "stage 1 was lost: StageLost"),
        (Fault(kind=FaultKind.REPEAT, stage=0, plan=0), r"stage 0 answered plans \[0, 0, 1"),
        (Fault(kind=FaultKind.REPEAT, stage=2, plan=5), "one event too many"),
    ],
    ids=lambda value: value.kind.value if isinstance(value, Fault) else "",
)
def test_the_checker_finds_a_planted_fault(fault, message):
    with pytest.raises(AssertionError, match=message):
        asyncio.run(check_stage_port(fake_pipeline(faults=[fault])))


@pytest.mark.slow
def test_the_checker_finds_a_port_that_loses_a_plan():
    class Forgetful(FakePort):
        def send(self, plan):
            if plan.number != 5:
                super().send(plan)

    make = fake_pipeline(port_class=Forgetful, tick_every_s=0.0001)
    with pytest.raises(AssertionError, match="a plan was not answered"):
        asyncio.run(check_stage_port(make))


def test_the_checker_asks_for_pools_that_its_plans_fit_in():
    sizings = tiny_sizings(1)

    @asynccontextmanager
    async def make():
        units = (Footprint(2, 0, 0),)
        yield FakePort(FakeStages(sizings, units)), sizings, units

    with pytest.raises(AssertionError, match=r"full_records=3.* are needed"):
        asyncio.run(check_stage_port(make))


def test_a_fake_stage_refuses_a_plan_out_of_order():
    stages = FakeStages(tiny_sizings(1), (Footprint(4, 0, 0),))
    late = conformance_plans(4)[1]
    with pytest.raises(PlanOrderError, match="plan 1 came, 0 is next"):
        stages.stages[0].apply(late)


def test_a_fake_stage_dies_of_rows_that_do_not_follow_on():
    stages = FakeStages(tiny_sizings(1), (Footprint(4, 0, 0),))
    first, second, *_ = conformance_plans(4)
    stages.answer(0)
    stages.send(first)
    stages.send(replace(second, rows=(second.rows[0]._replace(start=3), second.rows[1])))
    assert isinstance(stages.answer(0), StepDone)
    lost = stages.answer(0)
    assert isinstance(lost, StageLost)
    assert lost.kind == "InternalError"
    assert stages.answerable() == ()
    stages.send(Plan(2, (), (), (), ()))
    assert stages.answerable() == ()


def test_a_fake_stage_dies_when_a_pool_is_too_small():
    stages = FakeStages(tiny_sizings(1), (Footprint(1, 0, 0),))
    stages.answer(0)
    for plan in conformance_plans(4)[:2]:
        stages.send(plan)
    stages.answer(0)
    lost = stages.answer(0)
    assert isinstance(lost, StageLost)
    assert lost.kind == "OutOfRecords"


@pytest.fixture(scope="module")
def tiny_config(tmp_path_factory):
    from memkv_pp.testing.tiny_models import write_tiny_model

    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", layers=3)
    geometry = open_geometry(str(folder))
    formats = (parse_pair("q8_0:q5_1"),) * geometry.num_layers
    options = CacheOptions(block_tokens=4, prefill_chunk=4)
    fence = Fence((0, 1, 3))
    return PipelineConfig(
        model=str(folder),
        geometry=geometry,
        formats=formats,
        fence=fence,
        options=options,
        units=units_for_rows(size_fence(geometry, formats, fence, options), SEQUENCE_ROWS),
        devices=("cpu", "cpu"),
        max_sequences=2,
        waves=3,
        context_tokens=16,
        dtype="f32",
    )


def real_pipeline(config, stages_class):
    @asynccontextmanager
    async def make():
        stages = stages_class(config)
        try:
            yield await stages.open(), config.sizings(), config.units
        finally:
            await stages.close()

    return make


@pytest.mark.slow
def test_stages_on_threads_of_this_process_keep_the_contract(tiny_config):
    asyncio.run(check_stage_port(real_pipeline(tiny_config, LocalStages)))


@pytest.fixture(scope="module")
def cluster():
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 1024**2,
    )
    yield
    ray.shutdown()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("link", ["zmq", "gloo"])
def test_stages_on_ray_actors_keep_the_contract(tiny_config, link):
    from memkv_pp.config import Backend, LinkKind
    from memkv_pp.serve.cluster import RayStages

    config = replace(tiny_config, backend=Backend.RAY, link=LinkKind(link))
    asyncio.run(check_stage_port(real_pipeline(config, RayStages)))
