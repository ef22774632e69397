"""A stage from its plans: order, digests, refusals, and the exactness of --deterministic."""

import dataclasses
import os

import pytest
import torch

from memkv_pp.config import PipelineConfig, units_for_sequences
from memkv_pp.errors import ConfigError, InternalError, PlanOrderError, StageClosed
from memkv_pp.fence import even
from memkv_pp.formats import parse_pair
from memkv_pp.model.metadata import open_geometry
from memkv_pp.sizing import CacheOptions, size_fence
from memkv_pp.stage.control import QueueControl
from memkv_pp.stage.link import QueueLink
from memkv_pp.stage.runner import splits_evenly
from memkv_pp.stage.runtime import StageRuntime
from memkv_pp.stage.worker import StageWorker
from memkv_pp.testing.tiny_models import write_tiny_model
from memkv_pp.wire import Opened, Plan, Rows, Sampling, StageLost, StageReady, StepDone

SEQUENCES = 4
CONTEXT = 64
GREEDY = Sampling()


@pytest.fixture(autouse=True)
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", layers=3)


def config_of(model, *, kv="f32", stages=1, **knobs):
    geometry = open_geometry(str(model))
    formats, fence = (parse_pair(kv),) * geometry.num_layers, even(geometry.num_layers, stages)
    options = CacheOptions()
    sizings = size_fence(geometry, formats, fence, options)
    fields = {
        "units": units_for_sequences(sizings, CONTEXT, SEQUENCES),
        "devices": ("cpu",) * stages,
        "max_sequences": SEQUENCES,
        "waves": 1,
        "context_tokens": CONTEXT,
        "dtype": "f32",
    }
    return PipelineConfig(
        model=str(model),
        geometry=geometry,
        formats=formats,
        fence=fence,
        options=options,
        **(fields | knobs),
    )


def plan_of(number, rows=(), *, opened=(), closed=(), tokens=None):
    """``rows``: (sequence, start, count, sample). Token ids count up from 1 unless given."""
    chosen = tuple(Rows(*row) for row in rows)
    num_rows = sum(row.num_rows for row in chosen)
    return Plan(
        number,
        tuple(closed),
        tuple(Opened(sequence, GREEDY) for sequence in opened),
        chosen,
        tuple(range(1, num_rows + 1)) if tokens is None else tuple(tokens),
    )


class TickClock:
    """Every look at the clock is a second later."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        self.time += 1.0
        return self.time


def test_plans_are_applied_in_order_and_a_repeat_or_a_gap_changes_nothing(tiny):
    stage = StageRuntime(config_of(tiny), 0)
    first = plan_of(0, [(7, 0, 3, True)], opened=[7])
    stage.apply(first, None)
    with pytest.raises(PlanOrderError, match="plan 0 has applied before, plan 1 is next") as error:
        stage.apply(first, None)
    assert error.value.stage == 0
    with pytest.raises(PlanOrderError, match="plan 2 has a gap before it, plan 1 is next"):
        stage.apply(plan_of(2, closed=[7]), None)
    stage.check()
    _, done = stage.apply(plan_of(1, [(7, 3, 1, False)]), None)
    assert (done.plan, done.lengths) == (1, (4,))


def test_a_closed_stage_takes_no_plan_and_may_be_closed_twice(tiny):
    stage = StageRuntime(config_of(tiny), 0)
    stage.close()
    stage.close()
    assert stage.allocated_bytes == 0
    with pytest.raises(StageClosed, match="stage 0 is closed"):
        stage.apply(plan_of(0), None)


def test_the_digest_counts_rows_bytes_sequences_and_tokens(tiny):
    config = config_of(tiny, kv="q8_0:q5_1")
    (sizing,) = config.sizings()
    stage = StageRuntime(config, 0, TickClock())
    hidden, done = stage.apply(
        plan_of(0, [(7, 0, 17, True), (9, 0, 2, False)], opened=[7, 9]), None
    )
    assert hidden is None
    assert (done.stage, done.plan, done.lengths, done.sequences) == (0, 0, (17, 2), 2)
    assert done.used == (3 * sizing.record_bytes, 0, 0)
    assert len(done.tokens) == 1
    assert done.compute_ns == 10**9
    _, done = stage.apply(plan_of(1, [(9, 2, 1, True)], closed=[7]), None)
    assert (done.lengths, done.sequences, len(done.tokens)) == ((3,), 1, 1)
    assert done.used == (sizing.record_bytes, 0, 0)
    _, done = stage.apply(plan_of(2, closed=[9]), None)
    assert (done.lengths, done.sequences, done.tokens, done.used) == ((), 0, (), (0, 0, 0))
    stage.check()


def test_a_closed_sequence_may_be_opened_again_within_one_plan(tiny):
    stage = StageRuntime(config_of(tiny), 0)
    _, before = stage.apply(plan_of(0, [(7, 0, 5, True)], opened=[7]), None)
    _, after = stage.apply(plan_of(1, [(7, 0, 5, True)], opened=[7], closed=[7]), None)
    assert dataclasses.replace(after, plan=0, compute_ns=0) == dataclasses.replace(
        before, compute_ns=0
    )


@pytest.mark.parametrize(
    ("hidden", "found"), [(None, "none"), (torch.zeros(2, 64), "2"), (torch.zeros(0, 64), "0")]
)
def test_a_later_stage_refuses_hidden_states_of_other_rows(tiny, hidden, found):
    stage = StageRuntime(config_of(tiny, stages=2), 1)
    with pytest.raises(InternalError, match=f"has 3 rows, hidden states for {found} came"):
        stage.apply(plan_of(0, [(7, 0, 3, True)], opened=[7]), hidden)


@pytest.mark.parametrize("token", [-1, 320])
def test_a_token_id_out_of_the_vocabulary_is_refused(tiny, token):
    stage = StageRuntime(config_of(tiny), 0)
    with pytest.raises(InternalError, match=r"a token id is not in \[0, 320\)"):
        stage.apply(plan_of(0, [(7, 0, 2, True)], opened=[7], tokens=[3, token]), None)


def test_tokens_that_do_not_fill_the_rows_are_refused(tiny):
    stage = StageRuntime(config_of(tiny), 0)
    with pytest.raises(InternalError, match="plan 0: 2 tokens do not fill its rows"):
        stage.apply(plan_of(0, [(7, 0, 3, True)], opened=[7], tokens=[3, 4]), None)


def test_statistics_are_asked_of_the_stage(tiny):
    config = config_of(tiny, stages=2)
    sizing = config.sizings()[1]
    stage = StageRuntime(config, 1)
    stage.apply(plan_of(0, [(7, 0, 3, True)], opened=[7]), torch.zeros(3, 64))
    stage.apply(plan_of(1), None)
    found = stage.statistics()
    assert (found.stage, found.layers, found.pid, found.device_uuid) == (1, (1, 3), os.getpid(), "")
    assert found.allocated_bytes == sizing.bytes_of(config.units[1]) > 0
    assert found.used_bytes == sizing.record_bytes
    assert (found.plans_applied, found.layers_run, found.sequences) == (2, 2, 1)
    layer = 64 * (128 + 64 + 64 + 128) + 3 * 64 * 128 + 2 * 64
    assert found.weight_bytes == 4 * (2 * layer + 64 + 320 * 64)
    assert found.peak_bytes >= 0


def run_worker(config, stage, plans, hidden=()):
    """What a worker answers to ``plans`` before it ends; ``hidden`` waits on its upstream link."""
    answers = []
    control, link = QueueControl(answers.append), QueueLink()
    for item in plans:
        control.plans.put(item)
    for number, tensors in hidden:
        link.send(number, tensors)
    runtimes = []

    def load():
        runtimes.append(StageRuntime(config, stage))
        return runtimes[0]

    last = stage == config.num_stages - 1
    downstream = QueueLink()
    StageWorker(load, stage, control, link if stage else None, None if last else downstream).run()
    return answers, downstream


def test_a_worker_announces_answers_and_ends_when_told(tiny):
    config = config_of(tiny, stages=2)
    plan = plan_of(0, [(7, 0, 3, True)], opened=[7])
    (ready, done), downstream = run_worker(config, 0, [plan, None])
    (sizing, _) = config.sizings()
    assert ready == StageReady(0, sizing.bytes_of(config.units[0]))
    assert isinstance(done, StepDone)
    assert (done.lengths, done.tokens) == ((3,), ())
    hidden = downstream.receive(0, {"hidden": ((3, 64), torch.float32)})
    (_, done), _ = run_worker(config, 1, [plan, None], [(0, hidden)])
    assert len(done.tokens) == 1


@pytest.mark.parametrize(
    ("plans", "hidden", "kind", "message"),
    [
        pytest.param([plan_of(1)], [], "PlanOrderError", "a gap before it", id="order"),
        pytest.param(
            [plan_of(0, [(7, 0, 3, True)])],
            [(0, {"hidden": torch.zeros(3, 64)})],
            "InternalError",
            "sequence 7 is not open",
            id="not open",
        ),
        pytest.param(
            [plan_of(0, [(7, 0, 3, True)], opened=[7])],
            [(0, {"hidden": torch.zeros(2, 64)})],
            "InternalError",
            "the boundary brought",
            id="hidden states",
        ),
    ],
)
def test_a_failure_is_reported_with_its_class_and_ends_the_loop(tiny, plans, hidden, kind, message):
    never = plan_of(0)
    answers, _ = run_worker(config_of(tiny, stages=2), 1, [*plans, never], hidden)
    assert len(answers) == 2
    lost = answers[1]
    assert isinstance(lost, StageLost)
    assert (lost.stage, lost.kind) == (1, kind)
    assert message in lost.message
    assert lost.message.startswith("stage 1: ")


def test_a_stage_that_cannot_load_is_reported(tiny, tmp_path):
    config = dataclasses.replace(config_of(tiny), model=str(tmp_path / "nothing"))
    (lost,), _ = run_worker(config, 0, [])
    assert isinstance(lost, StageLost)
    assert lost.kind == "ConfigError"


def test_deterministic_refuses_a_hidden_size_with_vector_tails(tmp_path):
    model = write_tiny_model(tmp_path, "llama", layers=1, hidden=48)
    with pytest.raises(ConfigError, match="hidden size of 48 is no multiple of 32"):
        StageRuntime(config_of(model, deterministic=True), 0)
    StageRuntime(config_of(model), 0)


def test_deterministic_refuses_an_intermediate_size_with_vector_tails(tmp_path):
    model = write_tiny_model(tmp_path, "llama", layers=1, intermediate=130)
    with pytest.raises(ConfigError, match="intermediate size 130 leave vector tails on 1 threads"):
        StageRuntime(config_of(model, deterministic=True), 0)


@pytest.mark.parametrize(
    ("width", "threads", "even"),
    [
        (1536, 1, True),
        (132, 1, True),
        (130, 1, False),
        (5632, 1, True),
        (5632, 2, True),
        (5632, 4, False),
        (8192, 4, True),
        (8196, 2, False),
        (8196, 4, False),
        (8208, 4, True),
    ],
)
def test_rows_split_evenly_over_threads(width, threads, even):
    assert splits_evenly(width, threads) is even


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_activations_of_evenly_split_rows_do_not_depend_on_the_place(dtype, threads):
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    checked = 0
    for width in (132, 1536, 5632, 8196, 8208):
        if not splits_evenly(width, threads):
            continue
        rows = (3 * torch.randn(width, generator=generator)).to(dtype).repeat(1, 16, 1)
        for activation in (torch.nn.functional.silu, torch.nn.functional.gelu):
            found = activation(rows)[0]
            assert torch.equal(found, found[:1].expand_as(found))
        checked += 1
    assert checked >= 3


@pytest.mark.parametrize("place", ["layer 2", "the head"])
def test_a_machine_whose_rows_depend_on_their_place_is_found(tiny, place, monkeypatch):
    config = config_of(tiny, deterministic=True)
    stage = StageRuntime(config, 0)
    assert stage._runner.find_uneven_rows(head=True) is None
    model = stage._model
    run_layer, head = model.run_layer, model.head

    def nudged(rows):
        rows = rows.clone()
        rows[11, 3] = torch.nextafter(rows[11, 3], rows.new_tensor(torch.inf))
        return rows

    def faulty_layer(layer, *rest):
        out = run_layer(layer, *rest)
        return nudged(out) if f"layer {layer}" == place else out

    monkeypatch.setattr(model, "run_layer", faulty_layer)
    if place == "the head":
        monkeypatch.setattr(model, "head", lambda hidden: nudged(head(hidden)))
    assert stage._runner.find_uneven_rows(head=True) == place


class Logits:
    """The logits after each prompt, from the runner of one stage that holds every layer."""

    def __init__(self, model, *, kv, dtype, threads=1, deterministic=True):
        config = config_of(model, kv=kv, dtype=dtype, threads=threads, deterministic=deterministic)
        self.stage = StageRuntime(config, 0)
        self.cache = self.stage._cache
        self.opened = 0

    @torch.inference_mode()
    def after(self, prompts, cuts):
        """Run ``prompts`` together, each cut at ``cuts[i]``: f32 [prompts, V]."""
        names = [self.opened + i for i in range(len(prompts))]
        self.opened += len(prompts)
        for name in names:
            self.cache.open(name)
        ends = [[*cut, len(prompt)] for prompt, cut in zip(prompts, cuts, strict=True)]
        done = [0] * len(prompts)
        last = {}
        while any(ends):
            rows, tokens, who = [], [], []
            for i, prompt in enumerate(prompts):
                if ends[i]:
                    end = ends[i].pop(0)
                    rows.append(Rows(names[i], done[i], end - done[i], False))
                    tokens += prompt[done[i] : end]
                    done[i] = end
                    who.append((i, len(tokens) - 1))
            batch = self.cache.extend(rows)
            hidden = self.stage._runner.run(batch, self.stage._model.embed(torch.tensor(tokens)))
            last |= {i: hidden[row] for i, row in who}
        for name in names:
            self.cache.close(name)
        self.cache.check()
        return self.stage._runner.head(torch.stack([last[i] for i in range(len(prompts))]))


PROMPTS = [
    [(7 * i + 3 * j * j) % 320 for i in range(count)] for j, count in enumerate((37, 5, 18, 1))
]
CUTS = ([], [16], [1, 2, 3], [5, 21], [20, 36], list(range(1, 37)))


def company_differs(logits):
    """Whether any company, place or chunking changes a bit of the first prompt's logits."""
    (alone,) = logits.after(PROMPTS[:1], [[]])
    runs = [logits.after(PROMPTS[:1], [list(cut)])[0] for cut in CUTS]
    others = PROMPTS[1:]
    runs.append(logits.after([PROMPTS[0], *others], [[], [], [], []])[0])
    runs.append(logits.after([*others, PROMPTS[0]], [[], [], [], []])[3])
    runs.append(logits.after([*others, PROMPTS[0]], [[2], [9], [], [7, 8]])[3])
    return any(not torch.equal(alone, run) for run in runs)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kv", ["f32", "bf16", "q8_0:q5_1"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_deterministic_logits_do_not_depend_on_company_or_chunking(tiny, dtype, kv, threads):
    assert not company_differs(Logits(tiny, kv=kv, dtype=dtype, threads=threads))


@pytest.mark.slow
def test_the_gate_of_deterministic_goes_red_without_it(tiny):
    assert company_differs(Logits(tiny, kv="f32", dtype="f32", deterministic=False))


@pytest.mark.slow
def test_deterministic_stays_near_the_plain_path(tiny):
    fixed = Logits(tiny, kv="f32", dtype="f32").after(PROMPTS, [[]] * 4)
    plain = Logits(tiny, kv="f32", dtype="f32", deterministic=False).after(PROMPTS, [[]] * 4)
    assert fixed.abs().max() > 1
    assert (fixed - plain).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["f32", "q8_0:q5_1"])
def test_deterministic_logits_of_a_real_model_do_not_depend_on_company(smollm2, kv):
    logits = Logits(smollm2, kv=kv, dtype="f32")
    (alone,) = logits.after(PROMPTS[:1], [[]])
    (chunked,) = logits.after(PROMPTS[:1], [[5, 21, 36]])
    together = logits.after(PROMPTS[::-1], [[], [3], [1], [9]])[3]
    assert torch.equal(alone, chunked)
    assert torch.equal(alone, together)
