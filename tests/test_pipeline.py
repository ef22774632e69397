"""The main job on a real model: the same tokens however it is cut, carried and shared out."""

import dataclasses
from typing import Any

import pytest
import torch

from memkv_pp.config import Backend, LinkKind
from memkv_pp.fence import even
from memkv_pp.model.tokenizer import load_tokenizer

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived a girl who",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "In 1969, humans first walked on the surface of the",
    "The quick brown fox jumps over",
    "List the planets of the solar system in order: Mercury, Venus,",
    "Hello",
)
SAMPLE = pytest.param(4, 10, id="sample", marks=pytest.mark.slow)
WHOLE = pytest.param(
    8, 64, id="whole", marks=[pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1800)]
)
SCALES = pytest.mark.parametrize(("num_prompts", "max_new"), [SAMPLE, WHOLE])
WAVES = 4


@dataclasses.dataclass(frozen=True)
class Cut:
    stages: int
    fence: object
    backend: Backend = Backend.LOCAL
    link: LinkKind = LinkKind.ZMQ

    @property
    def knobs(self):
        return dataclasses.asdict(self) | {"waves": WAVES, "threads": 1}


UNSPLIT = Cut(1, "even")
LOCAL = (
    Cut(2, "even"),
    Cut(3, "even"),
    Cut(5, "even"),
    Cut(2, (0, 3, 30)),
    Cut(3, (0, 1, 29, 30)),
)
OVER_RAY = (
    Cut(5, (0, 2, 9, 10, 24, 30), Backend.RAY),
    Cut(2, (0, 21, 30), Backend.RAY, LinkKind.GLOO),
    pytest.param(Cut(2, "even", Backend.RAY), marks=pytest.mark.full),
    pytest.param(Cut(3, "even", Backend.RAY, LinkKind.GLOO), marks=pytest.mark.full),
)


@pytest.fixture(scope="module")
def prompts(smollm2):
    tokenizer = load_tokenizer(smollm2)
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def unsplit(smollm2, prompts, run_pipeline):
    """The reference run, made once per scale."""
    reports = {}

    def reference(num_prompts, max_new):
        key = (num_prompts, max_new)
        if key not in reports:
            reports[key] = run_pipeline(
                smollm2, prompts[:num_prompts], max_new=max_new, **UNSPLIT.knobs
            )
        return reports[key]

    return reference


def tokens(report):
    return [completion.tokens for completion in report.completions]


def plans_with_rows(report):
    return report.stages[0].layers_run // (report.stages[0].layers[1] - report.stages[0].layers[0])


def assert_every_stage_worked(report, cut):
    assert [stage.stage for stage in report.stages] == list(range(cut.stages))
    steps = plans_with_rows(report)
    assert steps > 0
    for stage in report.stages:
        lo, hi = stage.layers
        assert stage.layers_run == (hi - lo) * steps
        assert stage.plans_applied >= steps
    assert [stage.layers[0] for stage in report.stages[1:]] == [
        stage.layers[1] for stage in report.stages[:-1]
    ]
    assert report.stages[-1].layers[1] == 30


def assert_bytes_agree(report):
    for stage, promised in zip(report.stages, report.promised_bytes, strict=True):
        assert stage.allocated_bytes == promised > 0
        assert stage.used_bytes == 0


@SCALES
@pytest.mark.parametrize("cut", LOCAL, ids=lambda cut: f"{cut.stages}-{cut.fence}")
def test_greedy_tokens_are_the_same_on_any_local_fence(
    smollm2, prompts, run_pipeline, unsplit, cut, num_prompts, max_new
):
    report = run_pipeline(smollm2, prompts[:num_prompts], max_new=max_new, **cut.knobs)
    assert tokens(report) == tokens(unsplit(num_prompts, max_new))
    assert_every_stage_worked(report, cut)
    assert_bytes_agree(report)


@pytest.mark.ray
@SCALES
@pytest.mark.parametrize(
    "cut", OVER_RAY, ids=lambda cut: f"{cut.stages}-{cut.fence}-{cut.link.value}"
)
def test_greedy_tokens_are_the_same_over_ray_in_distinct_processes(
    ray_cluster, smollm2, prompts, run_pipeline, unsplit, cut, num_prompts, max_new
):
    report = run_pipeline(smollm2, prompts[:num_prompts], max_new=max_new, **cut.knobs)
    assert tokens(report) == tokens(unsplit(num_prompts, max_new))
    assert_every_stage_worked(report, cut)
    assert_bytes_agree(report)
    assert len({stage.pid for stage in report.stages}) == cut.stages


@SCALES
@pytest.mark.parametrize("kv", [pytest.param("f32:f32", marks=pytest.mark.full), "q8_0:q5_1"])
def test_deterministic_tokens_do_not_depend_on_company_or_waves(
    smollm2, prompts, run_pipeline, kv, num_prompts, max_new
):
    knobs = {"kv": kv, "max_new": max_new, "deterministic": True, "dtype": "bf16"}
    chosen = prompts[:num_prompts]
    together = tokens(run_pipeline(smollm2, chosen, **knobs))
    split = tokens(run_pipeline(smollm2, chosen, stages=3, fence=(0, 4, 17, 30), **knobs))
    assert split == together
    alone = [tokens(run_pipeline(smollm2, [prompt], **knobs))[0] for prompt in chosen]
    assert alone == together


@SCALES
def test_f32_tokens_with_an_f32_cache_equal_transformers_generate(
    smollm2, prompts, unsplit, num_prompts, max_new
):
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    ).eval()
    ours = tokens(unsplit(num_prompts, max_new))
    for prompt, found in zip(prompts[:num_prompts], ours, strict=True):
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=max_new,
            min_new_tokens=max_new,
            pad_token_id=0,
            eos_token_id=None,
        )
        assert output[0, len(prompt) :].tolist() == found


def test_the_plan_says_what_generate_allocates(smollm2, prompts, run_pipeline):
    from memkv_pp.formats import parse_pair
    from memkv_pp.kv_policy import layer_formats
    from memkv_pp.model.metadata import open_geometry
    from memkv_pp.plan.fences import Budget
    from memkv_pp.plan.planner import PlanRequest, plan_capacity
    from memkv_pp.sizing import CacheOptions

    geometry = open_geometry(smollm2)
    plan = plan_capacity(
        geometry,
        layer_formats(geometry, kv=parse_pair("q8_0:q5_1")),
        PlanRequest(
            budget=Budget(stage_bytes=(1 << 30, 1 << 30, 1 << 30), dtype_bytes=2),
            options=CacheOptions(),
            fence=(0, 7, 20, 30),
            ctx=200,
            sequences=3,
        ),
    )
    report = run_pipeline(
        smollm2,
        prompts[:2],
        kv="q8_0:q5_1",
        dtype="bf16",
        ctx=200,
        sequences=3,
        stages=3,
        fence=(0, 7, 20, 30),
        max_new=4,
    )
    for planned, stage, promised in zip(
        plan.stages, report.stages, report.promised_bytes, strict=True
    ):
        assert planned.context_bytes == stage.allocated_bytes == promised
        assert abs(planned.weight_bytes - stage.weight_bytes) <= 0.01 * stage.weight_bytes
        assert planned.layers == stage.layers


def test_sampled_tokens_depend_on_seed_and_prompt_index_alone(smollm2, prompts, run_pipeline):
    knobs = {"temperature": 0.8, "max_new": 6, "deterministic": True}
    whole = tokens(run_pipeline(smollm2, prompts[:3], **knobs))
    split = tokens(
        run_pipeline(smollm2, prompts[:3], stages=even(30, 3).num_stages, waves=1, **knobs)
    )
    assert split == whole
    assert whole != tokens(run_pipeline(smollm2, prompts[:3], max_new=6, deterministic=True))
