"""Every adapter against transformers' own forward pass, split against unsplit, GGUF against folder."""

from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GraniteConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging

from memkv_pp.errors import ConfigError, InternalError, ModelError
from memkv_pp.geometry import uniform_geometry
from memkv_pp.model.adapters import ADAPTERS, load_stage
from memkv_pp.model.hf_config import SERVED_FAMILIES
from memkv_pp.model.metadata import open_geometry
from memkv_pp.model.weights import open_weights
from memkv_pp.testing.plain_cache import PlainCache
from memkv_pp.testing.tiny_families import FAMILY_FIELDS
from memkv_pp.testing.tiny_models import write_tiny_gguf, write_tiny_model

logging.disable_progress_bar()

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SMOLLM2 = Path(__file__).parents[1] / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plain_cache(num_layers=5):
    """The oracle for layers that all keep every row."""
    return PlainCache(uniform_geometry(num_layers, kv_heads=2, head_size=32))


def stages(path, fence=(0, 5), dtype=torch.float32):
    last = len(fence) - 2
    return [
        load_stage(
            path, layers=range(fence[s], fence[s + 1]), first=s == 0, last=s == last, dtype=dtype
        )
        for s in range(last + 1)
    ]


def run_step(stage_models, cache, rows, token_ids, positions):
    """Logits of one packed step; ``rows`` holds (sequence, count) pairs."""
    cache.rows = rows
    with torch.inference_mode():
        hidden = stage_models[0].embed(token_ids)
        for stage in stage_models:
            rotary = stage.rotary(positions)
            for layer in stage.layers:
                hidden = stage.run_layer(layer, hidden, rotary, cache)
        return stage_models[-1].head(hidden)


def run_sequences(stage_models, sequences, prompts):
    """Prefill all in one ragged step, then one row each per step; [tokens, V] per sequence."""
    cache = plain_cache()
    logits = [[] for _ in sequences]
    done = [0] * len(sequences)
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        rows = [
            (i, 1 if done[i] else prompts[i])
            for i, sequence in enumerate(sequences)
            if done[i] < len(sequence)
        ]
        ids = torch.cat([sequences[i][done[i] : done[i] + n] for i, n in rows])
        positions = torch.cat([torch.arange(done[i], done[i] + n) for i, n in rows])
        out = run_step(stage_models, cache, rows, ids, positions)
        for (i, n), part in zip(rows, out.split([n for _, n in rows]), strict=True):
            logits[i].append(part)
            done[i] += n
    return [torch.cat(parts) for parts in logits]


def three_sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 320, (n,), generator=generator) for n in (10, 4, 7)], (7, 3, 5)


def reference_logits(folder, sequences):
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).float().eval()
    with torch.inference_mode():
        return [model(sequence[None]).logits[0] for sequence in sequences]


def largest_difference(left, right):
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_packed_step_and_its_decode_equal_transformers_on_every_row(family, tmp_path):
    folder = write_tiny_model(tmp_path, family)
    sequences, prompts = three_sequences()
    expected = reference_logits(folder, sequences)
    logits = run_sequences(stages(folder), sequences, prompts)
    assert [tuple(part.shape) for part in logits] == [(10, 320), (4, 320), (7, 320)]
    assert all(part.dtype is torch.float32 for part in logits)
    assert expected[0].std() > 1
    assert largest_difference(logits, expected) <= 1e-5


@pytest.mark.parametrize("fence", [(0, 2, 5), (0, 1, 2, 5)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_split_model_is_bit_identical_to_the_whole(family, fence, tmp_path):
    folder = write_tiny_model(tmp_path, family)
    sequences, prompts = three_sequences()
    whole = run_sequences(stages(folder), sequences, prompts)
    split = run_sequences(stages(folder, fence), sequences, prompts)
    assert all(torch.equal(a, b) for a, b in zip(whole, split, strict=True))


def test_a_gemma3_gguf_equals_the_folder_within_the_rounding_of_its_norms(tmp_path):
    folder = write_tiny_model(tmp_path, "gemma3", layers=6, tied=True)
    file = write_tiny_gguf(tmp_path, "gemma3", layers=6, tied=True)
    geometry = open_geometry(file)
    assert [x.kind for x in geometry.layers] == [x.kind for x in open_geometry(folder).layers]
    generator = torch.Generator().manual_seed(3)
    ids, made = torch.randint(0, 320, (40,), generator=generator), []
    for path in (folder, file):
        cache = PlainCache(geometry)
        made.append(run_step(stages(path, (0, 2, 6)), cache, [(0, 40)], ids, torch.arange(40)))
    assert largest_difference(made[:1], made[1:]) <= 1e-4


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_f32_gguf_is_bit_identical_to_the_folder(family, tied, tmp_path):
    folder = write_tiny_model(tmp_path, family, tied=tied)
    file = write_tiny_gguf(tmp_path, family, tied=tied)
    sequences, prompts = three_sequences()
    from_folder = run_sequences(stages(folder), sequences, prompts)
    from_gguf = run_sequences(stages(file), sequences, prompts)
    assert all(torch.equal(a, b) for a, b in zip(from_folder, from_gguf, strict=True))


@pytest.mark.parametrize(("kind", "bound"), [("f16", 0.05), ("q8_0", 0.5)])
def test_a_quantised_gguf_stays_near_the_folder(kind, bound, tmp_path):
    folder = write_tiny_model(tmp_path, "llama")
    file = write_tiny_gguf(tmp_path, "llama", kind=kind)
    sequences, prompts = three_sequences()
    difference = largest_difference(
        run_sequences(stages(folder), sequences, prompts),
        run_sequences(stages(file), sequences, prompts),
    )
    assert 0 < difference < bound


@pytest.mark.parametrize("rope", sorted(ROPES))
def test_scaled_rotations_equal_transformers_and_survive_the_gguf(rope, tmp_path):
    folder = write_tiny_model(tmp_path, "llama", rope=ROPES[rope])
    file = write_tiny_gguf(tmp_path, "llama", rope=ROPES[rope])
    generator = torch.Generator().manual_seed(2)
    sequences = [torch.randint(0, 320, (90,), generator=generator)]
    expected = reference_logits(folder, sequences)
    logits = run_sequences(stages(folder), sequences, (90,))
    assert largest_difference(logits, expected) <= 1e-4
    # llama3's factors are rounded to f32 in the file, so they divide to nearly the same frequency.
    from_gguf = run_sequences(stages(file), sequences, (90,))
    assert largest_difference(from_gguf, expected) <= (1e-3 if rope == "llama3" else 1e-4)
    plain = write_tiny_model(tmp_path / "plain", "llama")
    unscaled = run_sequences(stages(plain), sequences, (90,))
    assert largest_difference(unscaled, expected) > 0.1


class CountingSource:
    def __init__(self, source):
        self.source = source
        self.asked = []

    def names(self):
        return self.source.names()

    def tensor(self, name, dtype):
        self.asked.append(name)
        return self.source.tensor(name, dtype)


def expected_names(names, layers, *, first, last, tied):
    wanted = {n for n in names if any(n.startswith(f"model.layers.{i}.") for i in layers)}
    if first or (last and tied):
        wanted.add("model.embed_tokens.weight")
    if last:
        wanted.add("model.norm.weight")
        if not tied:
            wanted.add("lm_head.weight")
    return wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_reads_and_holds_only_its_own_tensors(family, tied, dtype, tmp_path):
    folder = write_tiny_model(tmp_path, family, tied=tied)
    sizes = {name: t.numel() for name, t in load_file(folder / "model.safetensors").items()}
    for stage in range(2):
        source = CountingSource(open_weights(folder))
        first, last = stage == 0, stage == 1
        layers = (range(2), range(2, 5))[stage]
        model = load_stage(
            folder, layers=layers, first=first, last=last, dtype=dtype, source=source
        )
        wanted = expected_names(sizes, layers, first=first, last=last, tied=tied)
        assert sorted(source.asked) == sorted(wanted)
        assert model.layers == tuple(layers)
        assert model.weight_bytes == dtype.itemsize * sum(sizes[name] for name in wanted)


def test_a_tied_head_on_the_stage_of_the_embedding_costs_nothing(tmp_path):
    folder = write_tiny_model(tmp_path, "llama", tied=True)
    sizes = {name: t.nbytes for name, t in load_file(folder / "model.safetensors").items()}
    (whole,) = stages(folder)
    assert whole.weight_bytes == sum(sizes.values())
    split = sum(stage.weight_bytes for stage in stages(folder, (0, 2, 5)))
    assert split == whole.weight_bytes + sizes["model.embed_tokens.weight"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_states_its_shape_and_refuses_what_it_does_not_hold(family, tmp_path):
    folder = write_tiny_model(tmp_path, family)
    front, back = stages(folder, (0, 2, 5))
    assert (front.family, front.hidden_size, front.vocabulary_size) == (family, 64, 320)
    with pytest.raises(InternalError, match="layer 4"):
        front.run_layer(4, torch.zeros(1, 64), front.rotary(torch.tensor([0])), plain_cache())
    with pytest.raises(InternalError, match="embedding"):
        back.embed(torch.tensor([1]))
    with pytest.raises(InternalError, match="head"):
        front.head(torch.zeros(1, 64))


def test_weights_are_loaded_in_the_compute_dtype_and_logits_come_in_f32(tmp_path):
    folder = write_tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    (stage,) = stages(folder, dtype=torch.bfloat16)
    hidden = stage.embed(torch.tensor([3]))
    assert hidden.dtype is torch.bfloat16
    stored = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(hidden[0], stored[3])
    assert stage.rotary(torch.tensor([5]))[""].cos.dtype is torch.bfloat16
    assert stage.head(hidden).dtype is torch.float32


def test_every_served_family_has_an_adapter():
    assert sorted(ADAPTERS) == sorted(SERVED_FAMILIES) == sorted(FAMILY_FIELDS)
    assert set(FAMILIES) < set(ADAPTERS)


def test_an_unknown_family_is_refused_by_name_with_the_list(tmp_path):
    GraniteConfig().save_pretrained(tmp_path)
    file = tmp_path / "granite.gguf"
    writer = GGUFWriter(file, "granite")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for path in (tmp_path, file):
        with pytest.raises(ModelError, match=r"'granite'.*llama, mistral, qwen2, qwen3"):
            stages(path)
    with pytest.raises(ModelError, match="granite"):
        write_tiny_model(tmp_path, "granite")


@pytest.mark.parametrize("architecture", ["gpt-oss", "qwen35", "lfm2"])
def test_a_family_without_a_gguf_reader_is_refused_by_name(architecture, tmp_path):
    file = tmp_path / "other.gguf"
    writer = GGUFWriter(file, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"is served from Hugging Face folders alone.*gemma3"):
        stages(file)


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("gemma4", {"hidden_size_per_layer_input": 16}, "hidden_size_per_layer_input"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen3_5", {"hidden_act": "gelu"}, "hidden_act = gelu"),
    ],
)
def test_what_of_a_family_is_not_served_is_refused_by_name(family, overrides, message, tmp_path):
    folder = write_tiny_model(tmp_path, family, layers=6, overrides=overrides)
    with pytest.raises(ModelError, match=rf"{message}.*not served of the family {family}"):
        stages(folder, (0, 6))


def test_a_rotation_that_depends_on_the_batch_is_refused(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    folder = write_tiny_model(tmp_path, "llama", rope=rope)
    with pytest.raises(ModelError, match="'dynamic'"):
        stages(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("attention.sliding_window", 64),
        ("attention.scale", 3),
        ("rope.dimension_count", 16),
        ("attention.head_count_kv", 0),
    ],
)
def test_gguf_metadata_that_is_not_served_is_refused_by_key(key, value, tmp_path):
    file = tmp_path / "odd.gguf"
    writer = GGUFWriter(file, "qwen2")
    figures = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 64,
        "feed_forward_length": 64,
        "attention.head_count": 2,
    }
    for name, number in (figures | {key: value}).items():
        writer.add_uint32(f"qwen2.{name}", number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=rf"qwen2\.{key} is {value}"):
        stages(file)


def test_a_missing_a_misshapen_and_an_unplaced_tensor_are_named(tmp_path):
    folder = write_tiny_model(tmp_path, "llama")
    path = folder / "model.safetensors"
    whole = load_file(path)
    name = "model.layers.3.mlp.up_proj.weight"
    changes = [
        ({n: t for n, t in whole.items() if n != name}, name),
        (whole | {name: torch.zeros(7, 64)}, rf"{name} has shape \(7, 64\).*\(128, 64\)"),
        (whole | {"model.layers.3.self_attn.q_proj.bias": torch.zeros(128)}, r"q_proj\.bias"),
    ]
    for tensors, message in changes:
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=message):
            stages(folder)
        stages(folder, (0, 3))  # the stage that does not read it loads


def test_layers_beyond_the_model_are_refused_with_the_numbers(tmp_path):
    folder = write_tiny_model(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"\[0, 6\) is no part of 5 layers"):
        stages(folder, (0, 6))


@pytest.mark.slow
def test_a_real_gguf_equals_transformers_within_a_thousandth():
    if not SMOLLM2.is_file():
        pytest.skip(f"{SMOLLM2} is absent: `make model` fetches it")
    # What `from_pretrained(gguf_file=…)` does, without the accelerate package that it asks for.
    config = AutoConfig.for_model(**load_gguf_checkpoint(SMOLLM2)["config"])
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    loaded = load_gguf_checkpoint(SMOLLM2, return_tensors=True, model_to_load=reference)
    missing = reference.load_state_dict(loaded["tensors"], strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["lm_head.weight"], [])
    reference.tie_weights()
    ids = torch.tensor([504, 3575, 282, 4649, 314, 260, 1345, 31, 216, 33])
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    del reference
    logits = run_step(
        stages(SMOLLM2, (0, 12, 30)), plain_cache(30), [(0, 10)], ids, torch.arange(10)
    )
    assert largest_difference([logits], [expected]) <= 1e-3
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
