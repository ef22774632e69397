import json
from collections import Counter
from pathlib import Path

import pytest

from memkv_pp import sizing
from memkv_pp.errors import ConfigError, FormatError, GeometryError
from memkv_pp.formats import DEFAULT_PAIR, parse_pair
from memkv_pp.geometry import LayerKind
from memkv_pp.model.from_config import geometry_from_config
from memkv_pp.model.geometry_file import geometry_from_json, to_json
from memkv_pp.model.metadata import MAX_JSON_BYTES, open_geometry, shipped_names
from memkv_pp.testing.gguf_files import Tensor, write_gguf

SMOLLM2 = Path(__file__).parents[1] / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
F, S, R, C, L, H = (
    LayerKind.FULL,
    LayerKind.SLIDING,
    LayerKind.RECURRENT,
    LayerKind.SHORT_CONV,
    LayerKind.LATENT,
    LayerKind.SHARED,
)


@pytest.fixture
def from_gguf(tmp_path):
    def build(arch, tensors=(), top=None, **keys):
        prefixed = {f"{arch}.{key.replace('__', '.')}": value for key, value in keys.items()}
        metadata = {"general.architecture": arch, **prefixed, **(top or {})}
        return open_geometry(write_gguf(tmp_path / "m.gguf", metadata, tensors))

    return build


def dense_keys(layers=4, heads=8, kv: int | list[int] = 2, size=64, **more):
    return {
        "block_count": layers,
        "embedding_length": 512,
        "attention__head_count": heads,
        "attention__head_count_kv": kv,
        "attention__key_length": size,
        "attention__value_length": size,
        **more,
    }


def config(family, layers=4, **more):
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 100,
        **more,
    }


def kinds(geometry):
    return [layer.kind for layer in geometry.layers]


def bytes_per_token(geometry, pair=DEFAULT_PAIR):
    return sum(sum(sizing.layer_bytes_per_token(layer, pair)) for layer in geometry.layers)


# --- dense families -----------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "mistral3", "qwen2", "qwen3", "qwen2moe", "qwen3moe"])
def test_a_dense_gguf_is_all_full_attention(from_gguf, arch):
    geometry = from_gguf(arch, **dense_keys(context_length=4096, vocab_size=100))
    assert kinds(geometry) == [F] * 4
    layer = geometry.layers[0]
    assert (layer.query_heads, layer.kv_heads, layer.key_head_size, layer.value_head_size) == (
        8, 2, 64, 64,
    )  # fmt: skip
    assert (geometry.context_tokens, geometry.vocabulary_size, geometry.hidden_size) == (
        4096, 100, 512,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "family"),
    [("qwen35", "qwen3_5"), ("gpt-oss", "gpt_oss"), ("qwen3moe", "qwen3_moe"), ("llama", "llama")],
)
def test_a_model_has_one_family_name_whichever_file_it_came_from(from_gguf, arch, family):
    ssm = {f"ssm__{key}": 4 for key in ("state_size", "group_count", "time_step_rank")}
    assert from_gguf(arch, **dense_keys(ssm__conv_kernel=4, **ssm)).family == family


def test_an_unknown_architecture_with_the_standard_keys_is_read_as_dense(from_gguf):
    assert kinds(from_gguf("brandnew", **dense_keys())) == [F] * 4


def test_missing_head_sizes_are_assumed_and_said(from_gguf):
    keys = dense_keys()
    del keys["attention__key_length"], keys["attention__value_length"]
    geometry = from_gguf("llama", **keys)
    assert geometry.layers[0].key_head_size == 512 // 8
    assert any("key_length is missing" in warning for warning in geometry.warnings)
    assert any("value_length is missing" in warning for warning in geometry.warnings)


def test_missing_kv_heads_are_the_query_heads(from_gguf):
    keys = dense_keys()
    del keys["attention__head_count_kv"]
    assert from_gguf("llama", **keys).layers[0].kv_heads == 8


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral"]
)
def test_a_dense_configuration_is_all_full_attention(family):
    geometry = geometry_from_config(config(family, max_position_embeddings=4096), "m")
    assert kinds(geometry) == [F] * 4
    assert geometry.layers[0].kv_heads == 2
    assert geometry.context_tokens == 4096


def test_a_nested_text_configuration_is_the_one_that_counts():
    geometry = geometry_from_config(
        {"model_type": "gemma3", "tie_word_embeddings": True, "text_config": config("gemma3_text")},
        "m",
    )
    assert (geometry.family, geometry.num_layers, geometry.tied_embedding) == ("gemma3", 4, True)


def test_a_configuration_without_a_head_size_says_what_it_assumed():
    plain = config("llama")
    del plain["head_dim"]
    geometry = geometry_from_config(plain, "m")
    assert geometry.layers[0].key_head_size == 64
    assert any("head_dim is missing" in warning for warning in geometry.warnings)


# --- per-layer arrays ---------------------------------------------------------------------------


def test_per_layer_arrays_are_honoured_past_any_sample(from_gguf):
    kv = [2] * 87 + [8]
    geometry = from_gguf("llama", **dense_keys(layers=88, kv=kv))
    assert [layer.kv_heads for layer in geometry.layers] == kv


@pytest.mark.parametrize(
    "key", ["attention__head_count", "attention__head_count_kv", "attention__recurrent_layers"]
)
def test_an_array_of_the_wrong_length_names_key_length_and_layers(from_gguf, key):
    with pytest.raises(GeometryError, match=rf"{key.replace('__', '.')} has 3 items for 4 layers"):
        from_gguf("llama", **(dense_keys() | {key: [1, 1, 1]}))


def test_a_sliding_pattern_of_the_wrong_length_is_refused(from_gguf):
    wrong = {"attention__sliding_window": 16, "attention__sliding_window_pattern": [True] * 5}
    with pytest.raises(GeometryError, match="sliding_window_pattern has 5 items for 4 layers"):
        from_gguf("gemma3", **dense_keys(**wrong))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("block_count", 0, "is 0"),
        ("block_count", 20_000, "over 10000 layers"),
        ("block_count", "4", "must be an integer"),
        ("embedding_length", 1.5, "must be an integer"),
        ("nextn_predict_layers", 4, "is 4 of 4 blocks"),
        ("attention__head_count", True, "must be an integer"),
        ("attention__head_count_kv", [2, 2, -2, 2], "is -2"),
    ],
)
def test_a_wrong_figure_names_its_key(from_gguf, key, value, says):
    with pytest.raises(GeometryError, match=rf"{key.split('__')[-1]}.*{says}"):
        from_gguf("llama", **(dense_keys() | {key: value}))


# --- sliding windows ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "layers", "expected"),
    [
        ("gemma2", 4, [S, F, S, F]),
        ("gemma3", 7, [S, S, S, S, S, F, S]),
        ("gpt-oss", 4, [S, F, S, F]),
        ("cohere2", 5, [S, S, S, F, S]),
        ("step35", 5, [F, S, S, S, F]),
        ("gemma4", 7, [S, S, S, S, S, F, S]),
        ("llama", 2, [S, S]),
    ],
)
def test_a_family_implies_its_sliding_pattern_and_says_so(from_gguf, arch, layers, expected):
    geometry = from_gguf(arch, **dense_keys(layers=layers, attention__sliding_window=16))
    assert kinds(geometry) == expected
    assert geometry.layers[expected.index(S)].window == 16
    assert any("pattern is not given" in warning for warning in geometry.warnings)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gemma2", [S, F, S, F]),
        ("gpt_oss", [S, F, S, F]),
        ("step3p5", [F, S, S, S]),
        ("mistral", [S, S, S, S]),
        ("brandnew", [F, F, F, F]),
    ],
)
def test_a_configuration_without_layer_types_has_its_familys_pattern(family, expected):
    geometry = geometry_from_config(config(family, sliding_window=16), "m")
    assert kinds(geometry) == expected
    assert any("sliding" in warning for warning in geometry.warnings)


def test_an_unknown_family_with_a_window_counts_in_full_and_says_so(from_gguf):
    geometry = from_gguf("brandnew", **dense_keys(attention__sliding_window=16))
    assert kinds(geometry) == [F] * 4
    assert any("without a pattern" in warning for warning in geometry.warnings)


def test_a_pattern_may_be_an_interval_or_a_list_and_needs_no_warning(from_gguf):
    window = {"attention__sliding_window": 16}
    by_interval = from_gguf("gemma3", **dense_keys(attention__sliding_window_pattern=2, **window))
    assert kinds(by_interval) == [S, F, S, F]
    assert by_interval.warnings == ("the file lists no tensors; weights are not counted",)
    pattern = [False, True, True, False]
    by_list = from_gguf("gemma3", **dense_keys(attention__sliding_window_pattern=pattern, **window))
    assert kinds(by_list) == [F, S, S, F]


def test_sliding_layers_have_head_sizes_of_their_own(from_gguf):
    geometry = from_gguf(
        "gemma3",
        **dense_keys(
            attention__sliding_window=16,
            attention__sliding_window_pattern=2,
            attention__key_length_swa=32,
            attention__value_length_swa=96,
        ),
    )
    sizes = [(layer.key_head_size, layer.value_head_size) for layer in geometry.layers]
    assert sizes == [(32, 96), (64, 64), (32, 96), (64, 64)]


def test_layer_types_are_honoured_and_use_sliding_window_false_wins():
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    sliding = config("qwen3", layer_types=types, sliding_window=16)
    assert kinds(geometry_from_config(sliding, "m")) == [F, S, S, F]
    off = geometry_from_config({**sliding, "use_sliding_window": False}, "m")
    assert kinds(off) == [F] * 4


def test_qwen_slides_from_max_window_layers_on():
    on = config("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=3)
    assert kinds(geometry_from_config(on, "m")) == [F, F, F, S]
    assert kinds(geometry_from_config({**on, "use_sliding_window": None}, "m")) == [F] * 4


@pytest.mark.parametrize("kind", ["chunked_attention", "mamba"])
def test_a_layer_type_this_cache_cannot_hold_is_refused_by_name(kind):
    with pytest.raises(GeometryError, match=rf"layer_types\[1\] is '{kind}'"):
        geometry_from_config(config("llama", 2, layer_types=["full_attention", kind]), "m")


def test_layer_types_of_the_wrong_length_are_refused():
    with pytest.raises(GeometryError, match="layer_types has 3 items for 4 layers"):
        geometry_from_config(config("llama", layer_types=["full_attention"] * 3), "m")


# --- hybrids, to the figures of the published receipts ------------------------------------------


def qwen35_keys(blocks, kv, value_heads, **more):
    return dense_keys(
        layers=blocks,
        heads=16,
        kv=kv,
        size=256,
        nextn_predict_layers=1,
        full_attention_interval=4,
        ssm__state_size=128,
        ssm__group_count=16,
        ssm__time_step_rank=value_heads,
        ssm__conv_kernel=4,
        ssm__inner_size=128 * value_heads,
        **more,
    )


QWEN35 = [
    # blocks, KV heads, value heads, KV layers, bytes per token, recurrent bytes (source's count)
    ("qwen3.5-9b", 33, 4, 32, 8, 14_848, 25 * 4_292_608),
    ("qwen3.5-27b", 65, 4, 48, 16, 29_696, 49 * 6_414_336),
    ("qwen3.5-35b-a3b", 41, 2, 32, 10, 9_280, 31 * 4_292_608),
]


@pytest.mark.parametrize(("name", "blocks", "kv", "values", "full", "per_token", "state"), QWEN35)
def test_qwen35_from_gguf_has_the_published_sizes(
    from_gguf, name, blocks, kv, values, full, per_token, state
):
    arch = "qwen35moe" if "35b" in name else "qwen35"
    geometry = from_gguf(arch, **qwen35_keys(blocks, kv, values))
    assert kinds(geometry) == [R, R, R, F] * full
    assert (geometry.num_layers, len(geometry.nextn_layers)) == (blocks - 1, 1)
    assert geometry.nextn_layers[0].kind is F
    assert geometry.nextn_layers[0].kv_heads == kv
    assert bytes_per_token(geometry) == per_token
    assert sizing.recurrent_bytes(geometry, count_nextn=True) == state


@pytest.mark.parametrize(("name", "blocks", "kv", "values", "full", "per_token", "state"), QWEN35)
def test_qwen35_from_a_configuration_and_by_name_is_the_same(
    name, blocks, kv, values, full, per_token, state
):
    linear = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": values,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    read = geometry_from_config(
        config(
            "qwen3_5_text",
            blocks - 1,
            num_key_value_heads=kv,
            head_dim=256,
            layer_types=(["linear_attention"] * 3 + ["full_attention"]) * full,
            mtp_num_hidden_layers=1,
            **linear,
        ),
        name,
    )
    for geometry in (read, open_geometry(name)):
        assert kinds(geometry) == [R, R, R, F] * full
        assert len(geometry.nextn_layers) == 1
        assert bytes_per_token(geometry) == per_token
        assert sizing.recurrent_bytes(geometry, count_nextn=True) == state


def test_a_missing_interval_is_assumed_for_the_gated_delta_families(from_gguf):
    keys = qwen35_keys(9, 2, 4)
    del keys["full_attention_interval"]
    geometry = from_gguf("qwen3next", **keys)
    assert kinds(geometry) == [R, R, R, F, R, R, R, F]
    assert any("full_attention_interval is missing" in warning for warning in geometry.warnings)


def test_a_nextn_layer_attends_with_the_models_heads_where_its_own_item_is_0(from_gguf):
    keys = qwen35_keys(5, 2, 4) | {"attention__head_count_kv": [0, 0, 0, 2, 0]}
    geometry = from_gguf("qwen35", **keys)
    assert kinds(geometry) == [R, R, R, F]
    assert [(x.kind, x.kv_heads) for x in geometry.nextn_layers] == [(F, 2)]


def test_the_recurrent_array_comes_before_the_interval(from_gguf):
    keys = qwen35_keys(4, 2, 4, attention__recurrent_layers=[True, False, True, True])
    assert kinds(from_gguf("qwen35", **keys)) == [R, F, R]


def test_lfm2_keeps_short_convolutions_where_there_are_no_kv_heads(from_gguf):
    geometry = from_gguf("lfm2", **dense_keys(kv=[0, 0, 2, 0], shortconv__l_cache=3))
    assert kinds(geometry) == [C, C, F, C]
    assert geometry.layers[0].conv_elements == 512 * 2
    types = ["conv", "conv", "full_attention", "conv"]
    same = geometry_from_config(config("lfm2", conv_L_cache=3, layer_types=types), "m")
    assert [(x.kind, x.conv_elements) for x in same.layers] == [
        (x.kind, x.conv_elements) for x in geometry.layers
    ]


@pytest.mark.parametrize("arch", ["nemotron_h", "granitehybrid", "jamba"])
def test_layers_without_kv_heads_are_recurrent(from_gguf, arch):
    ssm = {
        "ssm__state_size": 16,
        "ssm__inner_size": 1024,
        "ssm__conv_kernel": 4,
        "ssm__group_count": 2,
    }
    geometry = from_gguf(arch, **dense_keys(kv=[0, 2, 0, 0], **ssm))
    assert kinds(geometry) == [R, F, R, R]
    assert geometry.layers[0].conv_channels == 1024 + 2 * 2 * 16
    assert geometry.layers[0].state_elements == 1024 * 16


def test_a_model_of_recurrent_layers_alone_needs_no_heads(from_gguf):
    geometry = from_gguf(
        "mamba2",
        block_count=2,
        embedding_length=512,
        attention__head_count=0,
        ssm__state_size=16,
        ssm__inner_size=1024,
        ssm__conv_kernel=4,
        ssm__group_count=1,
    )
    assert kinds(geometry) == [R, R]


def test_no_kv_heads_and_no_state_is_an_error_and_never_zero_bytes(from_gguf):
    with pytest.raises(GeometryError, match="layer 1 has no KV heads"):
        from_gguf("llama", **dense_keys(kv=[2, 0, 2, 2]))


@pytest.mark.parametrize("arch", ["rwkv7", "falcon-h1", "llama4", "bert"])
def test_an_architecture_this_cache_cannot_hold_is_refused_by_name(from_gguf, arch):
    with pytest.raises(GeometryError, match=f"{arch} is refused"):
        from_gguf(arch, **dense_keys())


def test_a_recurrence_that_configurations_do_not_describe_is_refused_by_name():
    with pytest.raises(GeometryError, match="mamba_d_state describes a recurrence of jamba"):
        geometry_from_config(config("jamba", mamba_d_state=16), "m")


# --- Gemma 4, Step, latent attention ------------------------------------------------------------


def gemma4_keys(layers, kv, window, **more):
    return dense_keys(
        layers=layers,
        kv=kv,
        size=512,
        attention__key_length_swa=256,
        attention__value_length_swa=256,
        attention__sliding_window=window,
        attention__sliding_window_pattern=[(i + 1) % 6 != 0 for i in range(layers)],
        **more,
    )


GEMMA4 = [
    # layers, KV heads, window, shared, (sliding, full, shared), fp8 bytes per token
    ("E4B", 42, 2, 512, 18, (20, 4, 18), 28_672),
    ("26B", 30, [8, 8, 8, 8, 8, 2] * 5, 1024, 0, (25, 5, 0), 112_640),
    ("31B", 60, [16, 16, 16, 16, 16, 4] * 10, 1024, 0, (50, 10, 0), 450_560),
]


@pytest.mark.parametrize(("name", "layers", "kv", "window", "shared", "counts", "fp8"), GEMMA4)
def test_gemma4_from_gguf_has_the_published_sizes(
    from_gguf, name, layers, kv, window, shared, counts, fp8
):
    extra = {"attention__shared_kv_layers": shared} if shared else {}
    geometry = from_gguf("gemma4", **gemma4_keys(layers, kv, window, **extra))
    found = Counter(kinds(geometry))
    assert (found[S], found[F], found[H]) == counts
    assert bytes_per_token(geometry, parse_pair("fp8")) == fp8
    assert {(x.key_head_size, x.window) for x in geometry.layers if x.kind is S} == {(256, window)}
    assert {x.key_head_size for x in geometry.layers if x.kind is F} == {512}


def test_gemma4_e4b_readers_look_at_the_last_owner_of_their_kind(from_gguf):
    geometry = from_gguf("gemma4", **gemma4_keys(42, 2, 512, attention__shared_kv_layers=18))
    assert geometry.shared_edges() == tuple(
        (23 if (i + 1) % 6 == 0 else 22, i) for i in range(24, 42)
    )


def test_gemma4_says_which_defaults_it_took(from_gguf):
    keys = dense_keys(attention__sliding_window_pattern=[True, True, True, False])
    for key in ("attention__key_length", "attention__value_length"):
        del keys[key]
    geometry = from_gguf("gemma4", **keys)
    assert [x.key_head_size for x in geometry.layers] == [256, 256, 256, 512]
    assert geometry.layers[0].window == 1024
    assert sum("is missing; assumed" in warning for warning in geometry.warnings) == 5


@pytest.mark.parametrize(("name", "layers", "kv", "window", "shared", "counts", "fp8"), GEMMA4)
def test_gemma4_from_a_configuration_is_the_same(name, layers, kv, window, shared, counts, fp8):
    sliding_kv, full_kv = (kv[0], kv[5]) if isinstance(kv, list) else (kv, None)
    geometry = geometry_from_config(
        config(
            "gemma4_text",
            layers,
            num_key_value_heads=sliding_kv,
            num_global_key_value_heads=full_kv,
            attention_k_eq_v=full_kv is not None,
            head_dim=256,
            global_head_dim=512,
            sliding_window=window,
            num_kv_shared_layers=shared,
        ),
        name,
    )
    found = Counter(kinds(geometry))
    assert (found[S], found[F], found[H]) == counts
    assert bytes_per_token(geometry, parse_pair("fp8")) == fp8


def test_step_has_one_full_layer_before_three_sliding_ones(from_gguf):
    pattern = [i % 4 != 0 for i in range(45)]
    read = from_gguf(
        "step35",
        **dense_keys(
            layers=45,
            kv=8,
            size=128,
            attention__sliding_window=512,
            attention__sliding_window_pattern=pattern,
        ),
    )
    types = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    configured = geometry_from_config(
        config(
            "step3p5",
            45,
            num_key_value_heads=None,
            num_attention_groups=8,
            head_dim=128,
            sliding_window=512,
            layer_types=[*types, *["sliding_attention"] * 3],
            num_nextn_predict_layers=3,
            attention_other_setting={"num_attention_heads": 96, "num_attention_groups": 8},
        ),
        "step",
    )
    for geometry in (read, configured):
        assert Counter(kinds(geometry)) == {F: 12, S: 33}
        assert bytes_per_token(geometry) == 83_520
        sliding = [x for x in geometry.layers if x.kind is S]
        assert sum(sum(sizing.layer_bytes_per_token(x, DEFAULT_PAIR)) for x in sliding) == 61_248
    assert [x.kind for x in configured.nextn_layers] == [S, S, S]
    assert [x.query_heads for x in configured.layers[:2]] == [8, 96]


@pytest.mark.parametrize("arch", ["deepseek2", "glm-dsa"])
def test_latent_attention_keeps_one_row_of_latent_and_rope(from_gguf, arch):
    keys = dense_keys(
        kv=1, attention__kv_lora_rank=512, rope__dimension_count=64, nextn_predict_layers=1
    )
    geometry = from_gguf(arch, **keys)
    assert kinds(geometry) == [L, L, L]
    assert geometry.layers[0].key_row == (1, 576)
    assert geometry.nextn_layers[0].kind is L


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_from_a_configuration_is_the_same(family):
    latent = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 1,
    }
    geometry = geometry_from_config(config(family, **latent), "m")
    assert kinds(geometry) == [L] * 4
    assert geometry.layers[0].key_row == (1, 576)
    assert len(geometry.nextn_layers) == 1


# --- weights ------------------------------------------------------------------------------------


def test_weights_and_file_bytes_come_from_the_directory(from_gguf):
    tensors = [
        Tensor("token_embd.weight", (32, 10), "Q8_0"),
        Tensor("blk.0.attn_q.weight", (32, 4), "Q8_0"),
        Tensor("blk.0.attn_norm.weight", (32,)),
        Tensor("blk.1.attn_q.weight", (32, 2)),
        Tensor("blk.2.nextn.eh_proj.weight", (32, 3)),
        Tensor("output_norm.weight", (32,)),
        Tensor("output.weight", (32, 10)),
        Tensor("rope_freqs.weight", (16,)),
    ]
    keys = dense_keys(layers=3, nextn_predict_layers=1)
    geometry = from_gguf("llama", tensors, **keys)
    assert [x.weight_elements for x in geometry.layers] == [128 + 32, 64]
    assert geometry.nextn_layers[0].weight_elements == 96
    assert geometry.file_bytes_by_layer == (4 * 34 + 128, 256)
    assert (geometry.embedding_elements, geometry.embedding_file_bytes) == (320, 340)
    assert (geometry.head_elements, geometry.norm_elements) == (320, 32)
    assert geometry.head_file_bytes == 1280 + 128
    assert not geometry.tied_embedding
    assert from_gguf("llama", tensors[:-2], **keys).tied_embedding


def test_a_tensor_beyond_the_declared_blocks_is_refused(from_gguf):
    with pytest.raises(GeometryError, match=r"block_count is 4.*blk\.4\.x"):
        from_gguf("llama", [Tensor("blk.4.x", (1,))], **dense_keys())


def test_layers_without_weights_and_split_files_are_said(from_gguf):
    one = [Tensor("blk.0.x", (1,))]
    assert (
        "no weights for 3 of 4 layers, first 1" in from_gguf("llama", one, **dense_keys()).warnings
    )
    split = from_gguf("llama", one, {"split.count": 3}, **dense_keys())
    assert any("one of 3 parts" in warning for warning in split.warnings)


TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 50,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24,
    "n_routed_experts": 4, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip
BY_FORMULA = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {}),
    ("qwen2", {}),
    ("qwen3", {"attention_bias": True}),
    ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 40, "head_dim": 16}),
    ("qwen3_moe", {**MOE, "mlp_only_layers": [1]}),
    ("mixtral", {"num_local_experts": 4}),
    ("gemma", {}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("gemma4_text", {"num_kv_shared_layers": 2, "sliding_window": 16, "hidden_size_per_layer_input": 8,
                     "use_double_wide_mlp": True, "global_head_dim": 64,
                     "layer_types": ["sliding_attention", "full_attention"] * 2,
                     "vocab_size_per_layer_input": 50}),
    ("gpt_oss", {"num_local_experts": 4}),
    ("qwen3_next", {**LINEAR, **MOE, "shared_expert_intermediate_size": 40}),
    ("qwen3_5_text", LINEAR),
    ("qwen3_5_moe_text", {**LINEAR, **MOE, "shared_expert_intermediate_size": 40}),
    ("lfm2", {"head_dim": None, "layer_types": ["conv", "full_attention"] * 2}),
    ("deepseek_v2", {**MLA, "q_lora_rank": None}),
    ("deepseek_v3", {**MLA, "q_lora_rank": 32, "num_nextn_predict_layers": 0}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "more"), BY_FORMULA)
@pytest.mark.filterwarnings("ignore")
def test_formulas_count_exactly_the_parameters_of_transformers(family, more):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    raw = {**TINY, **more}
    built = transformers.AutoConfig.for_model(
        family, **{key: value for key, value in raw.items() if value is not None}
    )
    if more.get("q_lora_rank", 0) is None:
        built.q_lora_rank = None
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)
    saved = json.loads(built.to_json_string(use_diff=False))
    geometry = geometry_from_config(saved, family)
    theirs = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    ours = [layer.weight_elements for layer in geometry.layers]
    others = sum(p.numel() for p in model.parameters()) - sum(theirs)
    first_stage_tables = ours[0] - theirs[0]
    assert ours[1:] == theirs[1:]
    assert first_stage_tables == 0 or "gemma4" in family
    ends = geometry.embedding_elements + geometry.head_elements + geometry.norm_elements
    assert first_stage_tables + ends == others
    assert not any("formula" in warning for warning in geometry.warnings)


def test_a_family_without_a_formula_says_so():
    warnings = geometry_from_config(config("olmo3"), "m").warnings
    assert "weights of olmo3 are counted by Llama's formula" in warnings


# --- the door -----------------------------------------------------------------------------------


@pytest.mark.skipif(not SMOLLM2.is_file(), reason="the small model is not under .models/")
def test_smollm2_is_thirty_layers_of_three_kv_heads():
    geometry = open_geometry(SMOLLM2)
    assert kinds(geometry) == [F] * 30
    assert {(x.kv_heads, x.key_head_size, x.value_head_size) for x in geometry.layers} == {
        (3, 64, 64)
    }
    assert geometry.tied_embedding
    assert geometry.vocabulary_size == 49_152
    elements = sum(x.weight_elements for x in geometry.layers)
    assert elements + geometry.embedding_elements + geometry.norm_elements == 134_515_008


def test_a_folder_and_its_configuration_are_the_same_model(tmp_path):
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config("llama")))
    geometry = open_geometry(folder)
    assert geometry.name == "tiny-llama"
    assert open_geometry(str(folder / "config.json")) == geometry


@pytest.mark.parametrize("name", shipped_names())
def test_a_geometry_file_gives_its_geometry_back(tmp_path, name):
    geometry = open_geometry(name)
    (tmp_path / "g.json").write_text(to_json(geometry))
    assert open_geometry(tmp_path / "g.json") == geometry


def test_repeat_stands_for_equal_layers(tmp_path):
    layer = {"kind": "full_attention", "kv_heads": 2, "key_head_size": 64, "value_head_size": 64}
    document = {"schema": "memkv-pp/geometry/1", "name": "t", "layers": [{**layer, "repeat": 3}]}
    assert geometry_from_json(document, "t").num_layers == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": "memkv-pp/geometry/2"}, "schema"),
        ({"colour": "red"}, "colour is unknown"),
        ({"context_tokens": -1}, "context_tokens must be an integer"),
        ({"tied_embedding": 1}, "tied_embedding must be bool"),
        ({"default_kv": 8}, "default_kv must be str"),
        ({"default_kv": "q9_0"}, "t: default_kv: unknown format 'q9_0'"),
        ({"layers": {}}, "layers must be list"),
        ({"layers": []}, "at least one layer"),
        ({"layers": [{"kind": "full_attention", "heads": 1}]}, r"layers\[0\]\.heads is unknown"),
        ({"layers": [{"kind": "half_attention"}]}, r"layers\[0\]\.kind is 'half_attention'"),
        ({"layers": [{"kind": ["x"]}]}, r"layers\[0\]\.kind is"),
        ({"layers": [{"kind": "full_attention", "kv_heads": True}]}, "kv_heads must be an integer"),
        ({"layers": [{"kind": "full_attention"}]}, r"layers\[0\]: .*kv_heads must be positive"),
        ({"layers": [{"kind": "short_conv", "repeat": 10**9}]}, r"repeat is 1000000000"),
    ],
)
def test_a_geometry_file_is_read_strictly(change, says):
    document = {"schema": "memkv-pp/geometry/1", "layers": [], **change}
    with pytest.raises(GeometryError, match=says):
        geometry_from_json(document, "t")


@pytest.mark.parametrize("model", ["no-such-model", "missing/model.gguf", "missing.json"])
def test_what_is_not_there_is_an_error_that_names_the_model(model):
    with pytest.raises(ConfigError, match=f"MODEL: '{model}' is no file and no shipped name"):
        open_geometry(model)


def test_a_folder_without_a_configuration_and_a_file_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"MODEL: .*has no config\.json"):
        open_geometry(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"MODEL: .*neither \.gguf nor \.json"):
        open_geometry(tmp_path / "a.bin")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no JSON"),
        ("[1]", "must hold a JSON object"),
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ("[" * 200_000, "nested too deeply"),
        ('{"model_type": 3}', "model_type must be text"),
        ("{}", "model_type is missing"),
        ('{"x": ' + "9" * 5000 + "}", "is no JSON"),
    ],
)
def test_json_that_describes_no_model_is_refused(tmp_path, text, says):
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(GeometryError, match=says):
        open_geometry(tmp_path / "m.json")


def test_json_of_an_insane_size_is_refused_before_it_is_parsed(tmp_path):
    with (tmp_path / "m.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ConfigError, match=r"MODEL: .*is over 67108864 bytes"):
        open_geometry(tmp_path / "m.json")


def test_a_head_size_no_format_holds_is_for_the_format_to_refuse(from_gguf):
    geometry = from_gguf("llama", **dense_keys(size=40))
    with pytest.raises(FormatError, match="head size of 40"):
        bytes_per_token(geometry)


@pytest.mark.parametrize(
    ("family", "more", "size"),
    [
        ("llama", {}, 96),
        ("qwen3_moe", {**MOE, "mlp_only_layers": [1]}, 96),
        ("qwen3_moe", MOE, 2 * 24),
        ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 40}, 2 * 24 + 40),
        ("deepseek_v3", {**MLA, "first_k_dense_replace": 0, "n_shared_experts": 3}, (2 + 3) * 24),
        ("gemma4", {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "sliding_window": 16,
                    "layer_types": ["sliding_attention", "full_attention"] * 2}, 2 * 96),
    ],
)  # fmt: skip
def test_the_widest_feed_forward_row_counts_the_experts_that_a_row_uses(family, more, size):
    geometry = geometry_from_config({"model_type": family, **TINY, **more}, family)
    assert geometry.feed_forward_size == size
    assert not any("experts_per_tok" in warning for warning in geometry.warnings)


def test_a_missing_number_of_experts_per_row_is_said():
    config = {"model_type": "qwen3_moe", **TINY, **MOE}
    del config["num_experts_per_tok"]
    geometry = geometry_from_config(config, "bare")
    assert geometry.feed_forward_size == 24
    assert "num_experts_per_tok is missing" in " ".join(geometry.warnings)


def test_a_gguf_states_its_widest_feed_forward_row_too(from_gguf):
    assert from_gguf("llama", **dense_keys()).feed_forward_size == 0
    assert (
        from_gguf("llama", **dense_keys(feed_forward_length=[96, 0, 128, 96])).feed_forward_size
        == 128
    )
    experts = {"expert_used_count": 4, "expert_feed_forward_length": 64}
    sparse = from_gguf("qwen3moe", **dense_keys(feed_forward_length=96, **experts))
    assert sparse.feed_forward_size == 256
    shared = dense_keys(**experts, expert_shared_feed_forward_length=32)
    assert from_gguf("qwen2moe", **shared).feed_forward_size == 288
