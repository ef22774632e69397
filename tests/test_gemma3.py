"""The real Gemma-3-270M past its window: our caches against transformers, row by row."""

import itertools
import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging

from memkv_pp.cache import host_attention, host_kernels
from memkv_pp.cli.app import main
from memkv_pp.model.hf_config import model_config
from memkv_pp.model.tokenizer import load_tokenizer
from memkv_pp.model.weights import open_weights
from memkv_pp.sizing import CacheOptions
from memkv_pp.testing.stages import Stages
from memkv_pp.wire import Rows

logging.disable_progress_bar()

# Largest |logit - transformers'|: both sum in f32, in other orders. The logits' spread is about 5.
BOUND = 2e-3
WINDOW = 512
TEXT = (
    "The lamp was lit at dusk, and the keeper wrote the hour into his book. Entry {0}: wind from the"
    " north, {1} ships in the bay, the glass at {2}. Nothing else was seen.\n"
)


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def transformers_model(gemma3):
    """transformers' model with the file's weights, as we read them."""
    source = open_weights(gemma3)
    model = AutoModelForCausalLM.from_config(model_config(gemma3), dtype=torch.float32).eval()
    state = {name: source.tensor(name, torch.float32) for name in source.names()}
    missing = model.load_state_dict(state, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def prompt(gemma3):
    """2,500 tokens of a text that does not repeat itself."""
    text = "".join(TEXT.format(i, i * 7 % 12, 980 + i * 13 % 50) for i in range(90))
    return torch.tensor(load_tokenizer(gemma3).encode(text)[:2500])


def packed():
    if host_kernels.load() is None:
        pytest.skip(f"no host kernels: {host_kernels.status().found}")
    return host_attention.loaded()


@pytest.mark.slow
@pytest.mark.full
def test_the_weights_are_those_that_transformers_reads(gemma3, transformers_model):
    tensors = load_gguf_checkpoint(gemma3, return_tensors=True, model_to_load=transformers_model)[
        "tensors"
    ]
    source = open_weights(gemma3)
    assert set(tensors) == set(source.names())
    for name, tensor in tensors.items():
        assert torch.equal(source.tensor(name, torch.float32), torch.as_tensor(tensor)), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_tokens", "num_new"),
    [
        pytest.param(600, 4, id="sample"),
        pytest.param(2500, 64, id="whole", marks=[pytest.mark.full, pytest.mark.timeout(1800)]),
    ],
)
def test_a_prompt_past_the_window_equals_transformers_on_every_row(
    gemma3, transformers_model, prompt, num_tokens, num_new
):
    prompt = prompt[:num_tokens]
    stages = Stages(
        gemma3, (0, 7, 18), attention=packed(), sequences=1, rows=num_tokens + num_new,
        options=CacheOptions(prefill_chunk=128),
    )  # fmt: skip
    stages.open(0)
    logits, used = [], []
    for start in range(0, num_tokens, 128):
        chunk = prompt[start : start + 128]
        logits.append(stages.step([Rows(0, start, len(chunk), True)], chunk))
        used.append([cache.used_bytes() for cache in stages.caches])
    found = torch.cat(logits)
    tokens = [int(found[-1].argmax())]
    for position in range(num_tokens, num_tokens + num_new - 1):
        row = stages.step([Rows(0, position, 1, True)], torch.tensor(tokens[-1:]))
        tokens.append(int(row[0].argmax()))
    with torch.inference_mode():
        expected = transformers_model(prompt[None]).logits[0]
        largest = max(
            (a - b).abs().max() for a, b in zip(found.split(128), expected.split(128), strict=True)
        )
        whole = transformers_model.generate(
            prompt[None], max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False
        )
    assert largest <= BOUND, f"{largest:.2e} of logits with a spread of {expected.std():.2f}"
    assert tokens == whole[0, num_tokens:].tolist()
    ring = -(-(WINDOW + 128 + 64 + 31) // 16)
    for stage, cache in enumerate(stages.caches):
        last = [bytes_of[stage] for bytes_of in used]
        assert max(b.window for b in last) <= ring * cache.arena.sizing.window_record_bytes
        assert all(b.full > a.full for a, b in itertools.pairwise(last[:-1]))
    if num_tokens > 2 * WINDOW:
        tail = [[b.window for b in bytes_of] for bytes_of in used[6:]]
        assert all(windows == tail[0] for windows in tail)


@pytest.mark.slow
def test_a_folder_written_from_the_file_gives_the_same_logits(gemma3, prompt, tmp_path):
    source, config = open_weights(gemma3), model_config(gemma3)
    config.architectures = ["Gemma3ForCausalLM"]
    config.save_pretrained(tmp_path)
    save_file(
        {name: source.tensor(name, torch.float32) for name in source.names()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gemma3_text"
    made = []
    for path in (gemma3, tmp_path):
        stages = Stages(path, (0, 18), attention=packed(), sequences=1, rows=64)
        stages.open(0)
        made.append(stages.step([Rows(0, 0, 64, True)], prompt[:64]))
    assert torch.equal(*made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fence", "devices"),
    [
        ((0, 8, 18), ("2GiB", "1.5GiB")),
        pytest.param((0, 5, 6, 18), ("2GiB", "1GiB", "3GiB"), marks=pytest.mark.full),
    ],
)
def test_the_plan_says_what_generate_allocates(
    gemma3, prompt, fence, devices, run_pipeline, capsys
):
    written = ",".join(map(str, fence))
    sizes = [word for size in devices for word in ("--device", size)]
    words = ["--fence", written, "--ctx", "1500", "--sequences", "2", "--kv", "q8_0:q5_1"]
    assert main(["plan", str(gemma3), *sizes, *words, "--reserve", "0", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["stages"]
    report = run_pipeline(
        gemma3, [prompt[:20].tolist()], kv="q8_0:q5_1", max_new=2, ctx=1500, sequences=2,
        stages=len(devices), fence=fence, dtype="bf16",
    )  # fmt: skip
    figures = zip(planned, report.stages, report.promised_bytes, strict=True)
    for stage, served, promised in figures:
        assert stage["context_bytes"] == served.allocated_bytes == promised
        assert stage["weight_bytes"] == served.weight_bytes
