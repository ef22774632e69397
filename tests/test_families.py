"""Tiny models of every family through the stages' own caches, against transformers on every row."""

import json
import random
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from memkv_pp.cache import host_attention, host_kernels
from memkv_pp.config import Backend
from memkv_pp.errors import ModelError
from memkv_pp.formats import parse_pair
from memkv_pp.model.adapters import ADAPTERS
from memkv_pp.model.metadata import open_geometry
from memkv_pp.plan.fences import Budget
from memkv_pp.plan.planner import PlanRequest, plan_capacity
from memkv_pp.sizing import CacheOptions
from memkv_pp.testing.stages import Stages
from memkv_pp.testing.tiny_models import write_tiny_model
from memkv_pp.wire import Rows

logging.disable_progress_bar()

LAYERS = 6
STEP_LIKE = {
    "use_sliding_window": True,
    "sliding_window": 12,
    "layer_types": [
        "full_attention",
        *["sliding_attention"] * 3,
        "full_attention",
        "sliding_attention",
    ],
}
MODELS = {family: (family, {}) for family in sorted(ADAPTERS)} | {
    "step-like": ("qwen3", STEP_LIKE),
    "mistral-window": ("mistral", {"sliding_window": 12}),
}
SAMPLED = (("qwen3_5", 4),)
OPTIONS = CacheOptions(block_tokens=4, prefill_chunk=32, rewind_slack=8)
# A source and its readers stay together: gemma4's layers 4 and 5 read 2 and 3.
CUTS = {1: (0, 6), 2: (0, 1, 6), 3: (0, 1, 2, 6), 4: (0, 1, 2, 5, 6)}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Callable: the folder of a tiny model, written once."""
    folders = {}

    def write(name):
        if name not in folders:
            family, overrides = MODELS[name]
            folders[name] = write_tiny_model(
                tmp_path_factory.mktemp(name), family, layers=LAYERS, overrides=overrides
            )
        return folders[name]

    return write


def cuts_of(name, stages):
    if name == "gemma4" and stages == 4:
        return (0, 1, 2, 6)
    return CUTS[stages]


def ragged_run(stages, sequences, seed=0):
    """Logits [tokens, V] of each sequence; they join and leave as chance has it."""
    source = random.Random(seed)
    waiting, live = list(range(len(sequences))), {}
    logits = [[] for _ in sequences]
    while waiting or live:
        while waiting and (not live or source.random() < 0.5):
            live[waiting[0]] = 0
            stages.open(waiting.pop(0))
        chosen = source.sample(sorted(live), source.randint(1, len(live)))
        rows = [
            Rows(s, live[s], min(source.choice((1, 2, 7, 20)), len(sequences[s]) - live[s]), True)
            for s in chosen
        ]
        tokens = torch.cat([sequences[r.sequence][r.start : r.start + r.num_rows] for r in rows])
        out = stages.step(rows, tokens).split([r.num_rows for r in rows])
        for entry, part in zip(rows, out, strict=True):
            logits[entry.sequence].append(part)
            live[entry.sequence] += entry.num_rows
            if live[entry.sequence] == len(sequences[entry.sequence]):
                del live[entry.sequence]
                stages.close(entry.sequence)
    return [torch.cat(parts) for parts in logits]


def transformers_model(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).float().eval()


def reference(folder, sequences):
    model = transformers_model(folder)
    with torch.inference_mode():
        # Hidden states are asked for since gemma4 otherwise drops rows that its last layers share.
        return [model(s[None], output_hidden_states=True).logits[0] for s in sequences]


def six_sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 320, (n,), generator=generator) for n in (40, 4, 17, 1, 33, 25)]


def packed():
    if host_kernels.load() is None:
        pytest.skip(f"no host kernels: {host_kernels.status().found}")
    return host_attention.loaded()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_ragged_sequences_equal_transformers_on_every_row_over_any_stages(name, written):
    folder, sequences = written(name), six_sequences()
    expected = reference(folder, sequences)
    assert expected[0].std() > 1
    whole = None
    for stages in (1, 2, 3, 4):
        found = ragged_run(
            Stages(folder, cuts_of(name, stages), attention=packed(), options=OPTIONS), sequences
        )
        for left, right in zip(found, expected, strict=True):
            assert (left - right).abs().max() <= 1e-5 * right.std()
        whole = whole or found
        assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "lfm2", "qwen3_5", "step-like"])
def test_deterministic_rows_do_not_depend_on_their_company(name, written):
    folder, sequences = written(name), six_sequences()
    options = {"attention": packed(), "options": OPTIONS, "deterministic": True}
    together = ragged_run(Stages(folder, cuts_of(name, 2), **options), sequences)
    again = ragged_run(Stages(folder, cuts_of(name, 3), **options), sequences, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(together, again, strict=True))
    for sequence, found in zip(sequences, together, strict=True):
        (alone,) = ragged_run(Stages(folder, (0, 6), **options), [sequence], seed=5)
        assert torch.equal(found, alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gpt_oss", "deepseek_v3"])
def test_unpacked_rows_equal_transformers_too(name, written):
    folder, sequences = written(name), six_sequences()
    found = ragged_run(Stages(folder, cuts_of(name, 2), options=OPTIONS), sequences)
    for left, right in zip(found, reference(folder, sequences), strict=True):
        assert (left - right).abs().max() <= 1e-5 * right.std()


def greedy(folder, prompts, max_new):
    """Tokens that transformers draws, from whole passes without a cache of its own."""
    model = transformers_model(folder)
    drawn = []
    for prompt in prompts:
        tokens = prompt.tolist()
        for _ in range(max_new):
            with torch.inference_mode():
                out = model(torch.tensor([tokens]), output_hidden_states=True)
            tokens.append(int(out.logits[0, -1].argmax()))
        drawn.append(tokens[len(prompt) :])
    return drawn


def serve(run_pipeline, written, name, stages, backend):
    """A pipeline's report on six ragged prompts, whose tokens equal transformers'."""
    folder, prompts = written(name), six_sequences()
    cuts = cuts_of(name, stages)
    report = run_pipeline(
        folder,
        [prompt.tolist() for prompt in prompts],
        max_new=6,
        ctx=64,
        sequences=6,
        options=OPTIONS,
        stages=len(cuts) - 1,
        fence=cuts,
        backend=backend,
        threads=1,
    )
    assert [completion.tokens for completion in report.completions] == greedy(folder, prompts, 6)
    geometry = open_geometry(folder)
    plan = plan_capacity(
        geometry,
        (parse_pair("f32"),) * (geometry.num_layers + len(geometry.nextn_layers)),
        PlanRequest(
            budget=Budget(stage_bytes=(1 << 30,) * (len(cuts) - 1), cache_only=True),
            options=OPTIONS,
            fence=cuts,
            ctx=64,
            sequences=6,
        ),
    )
    figures = zip(report.stages, report.promised_bytes, plan.stages, strict=True)
    for stage, promised, planned in figures:
        assert stage.allocated_bytes == promised == planned.context_bytes > 0
        assert stage.used_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages", [3, *(pytest.param(count, marks=pytest.mark.full) for count in (1, 2, 4))]
)
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_local_pipeline_draws_the_tokens_of_transformers(name, stages, written, run_pipeline):
    serve(run_pipeline, written, name, stages, Backend.LOCAL)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        pytest.param(name, stages, marks=[] if (name, stages) in SAMPLED else [pytest.mark.full])
        for name in sorted(MODELS)
        for stages in (2, 4)
    ],
)
def test_a_pipeline_on_ray_draws_the_tokens_of_transformers(
    name, stages, written, run_pipeline, ray_cluster
):
    serve(run_pipeline, written, name, stages, Backend.RAY)


def logits_of(folder):
    stages = Stages(folder, (0, LAYERS), options=OPTIONS, sequences=1)
    stages.open(0)
    return stages.step([Rows(0, 0, 20, True)], six_sequences()[0][:20])


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3"])
def test_experts_that_a_checkpoint_holds_apart_give_the_same_bits(name, written, tmp_path):
    folder = copied(written(name), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    apart = {}
    for key, tensor in tensors.items():
        layer, _, what = key.partition(".experts.")
        for expert, matrix in enumerate(tensor if what else ()):
            parts = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
            for part, rows in parts if what == "gate_up_proj" else [("down_proj", matrix)]:
                apart[f"{layer}.experts.{expert}.{part}.weight"] = rows.clone()
        if not what:
            apart[key] = tensor
    assert len(apart) > len(tensors)
    save_file(apart, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_of(folder), logits_of(written(name)))
    lost = {key: tensor for key, tensor in apart.items() if ".experts.1.up_proj" not in key}
    save_file(lost, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"experts\.1\.up_proj\.weight"):
        logits_of(folder)


@pytest.mark.parametrize(
    ("name", "prefix", "replaced"),
    [
        ("gemma3", "model.language_model.", "model."),
        ("gemma3", "language_model.", ""),
        ("qwen3_5", "model.language_model.", "model."),
    ],
)
def test_the_text_model_of_one_that_also_sees_is_found_under_its_prefix(
    name, prefix, replaced, written, tmp_path
):
    folder = copied(written(name), tmp_path)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": name, "text_config": text}))
    tensors = load_file(folder / "model.safetensors")
    moved = {
        prefix + key.removeprefix(replaced) if key.startswith("model.") or not replaced else key: t
        for key, t in tensors.items()
    }
    moved["vision_tower.patch.weight"] = torch.zeros(2, 2)
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_of(folder), logits_of(written(name)))


def copied(folder, to):
    shutil.copytree(folder, to / "copy")
    return to / "copy"
