"""The shipped geometries: derived from the figures they name, and equal to what others publish."""

import json
from dataclasses import replace
from importlib import resources

import pytest

from memkv_pp.errors import GeometryError
from memkv_pp.fence import even
from memkv_pp.formats import Pair, parse_pair
from memkv_pp.geometry import LayerKind, ModelGeometry
from memkv_pp.model.from_config import geometry_from_config
from memkv_pp.model.geometry_file import geometry_from_json, to_json
from memkv_pp.model.metadata import open_geometry, shipped_names
from memkv_pp.sizing import CacheOptions, recurrent_bytes, size_fence, size_layers

# Parameters of the language model as published with the checkpoints (safetensors or GGUF totals),
# without vision towers and NextN layers. No file of ours was read for these.
PUBLISHED_PARAMETERS = {
    "deepseek-v3": 671_026_419_200,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-270m": 268_098_176,
    "gemma-3-27b": 27_009_346_304,
    "gemma-3-4b": 3_880_263_168,
    "gemma-4-31b": 30_697_345_280,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "lfm2-1.2b": 1_170_340_608,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-32b": 32_762_123_264,
    "qwen3-8b": 8_190_735_360,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-9b": 8_953_803_264,
    "smollm2-135m": 134_515_008,
}
PUBLISHED_NEXTN = {
    "qwen3-next-80b-a3b": 1_650_471_424,
    "qwen3.5-35b-a3b": 844_640_768,
    "qwen3.5-9b": 243_290_624,
}
# One router bias per expert of the 58 sparse layers: a buffer that the checkpoint counts.
DEEPSEEK_ROUTER_BIASES = 58 * 256

BF16 = parse_pair("bf16")
DEFAULT = parse_pair("q8_0:q5_1")
E4M3 = parse_pair("fp8")
WHOLE = CacheOptions(ring=False)


def shipped_text(name: str) -> str:
    return (resources.files("memkv_pp.model") / "shipped" / f"{name}.json").read_text("utf-8")


def per_token(geometry: ModelGeometry, pair: Pair, *, global_pair: Pair | None = None) -> int:
    """Bytes of one token over all trunk layers, windows not capped."""
    formats = [
        (global_pair or pair) if layer.kind is LayerKind.FULL else pair
        for layer in (*geometry.layers, *geometry.nextn_layers)
    ]
    return size_layers(geometry, formats, range(geometry.num_layers), WHOLE).bytes_per_token


def test_every_shipped_model_is_checked_against_a_published_count():
    assert set(shipped_names()) == set(PUBLISHED_PARAMETERS)


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_file_is_what_its_source_derives_byte_for_byte(name):
    text = shipped_text(name)
    source = json.loads(text)["source"]
    assert to_json(geometry_from_config(source["config"], name), source) == text


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_model_names_its_source_and_assumes_nothing(name):
    says = json.loads(shipped_text(name))["source"]["says"]
    assert says
    assert all(len(sentence) > 20 for sentence in says)
    geometry = open_geometry(name)
    assert geometry.warnings == ()
    assert geometry.context_tokens > 0


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_weights_add_up_to_the_published_parameters(name):
    geometry = open_geometry(name)
    elements = sum(layer.weight_elements for layer in geometry.layers)
    elements += geometry.embedding_elements + geometry.head_elements + geometry.norm_elements
    elements += DEEPSEEK_ROUTER_BIASES if name == "deepseek-v3" else 0
    assert elements == PUBLISHED_PARAMETERS[name]
    if name in PUBLISHED_NEXTN:
        nextn = sum(layer.weight_elements for layer in geometry.nextn_layers)
        assert nextn == PUBLISHED_NEXTN[name]


@pytest.mark.parametrize(
    ("name", "pair", "bytes_per_token"),
    [
        ("deepseek-v3", BF16, 70_272),  # "Insights into DeepSeek-V3", table 1: 70.272 KB
        ("llama-3.1-70b", BF16, 327_680),
        ("llama-3.1-8b", BF16, 131_072),
        # dual-cache-and-pipeline.md 3.2 and 3.3
        ("qwen3.5-9b", DEFAULT, 14_848),
        ("qwen3.5-27b", DEFAULT, 29_696),
        ("qwen3.5-35b-a3b", DEFAULT, 9_280),
        ("gemma-4-31b", E4M3, 450_560),
        ("gemma-4-31b", DEFAULT, 408_320),
    ],
)
def test_a_token_takes_the_published_bytes(name, pair, bytes_per_token):
    assert per_token(open_geometry(name), pair) == bytes_per_token


def test_gemma_4_with_e4m3_on_its_global_layers_alone_takes_the_published_bytes():
    assert per_token(open_geometry("gemma-4-31b"), DEFAULT, global_pair=E4M3) == 412_160


@pytest.mark.parametrize(
    ("name", "stages", "per_stage", "recurrent"),
    [
        ("qwen3.5-9b", 2, (7_424, 7_424), 25 * 4_292_608),
        ("qwen3.5-27b", 4, (7_424,) * 4, 49 * 6_414_336),
        ("qwen3.5-35b-a3b", 4, (1_856, 2_784, 1_856, 2_784), 31 * 4_292_608),
    ],
)
def test_qwen_3_5_by_name_has_the_published_stages_and_states(name, stages, per_stage, recurrent):
    geometry = open_geometry(name)
    formats = (DEFAULT,) * (geometry.num_layers + len(geometry.nextn_layers))
    sized = size_fence(geometry, formats, even(geometry.num_layers, stages), CacheOptions())
    assert tuple(stage.bytes_per_token for stage in sized) == per_stage
    assert recurrent_bytes(geometry, count_nextn=True) == recurrent


@pytest.mark.parametrize(
    ("name", "file"), [("gemma-3-270m", "gemma3"), ("smollm2-135m", "smollm2")]
)
def test_a_shipped_model_is_the_one_of_its_gguf_file(name, file, request):
    read = open_geometry(request.getfixturevalue(file))
    from_tensors = {
        "name": name,
        "file_bytes_by_layer": (),
        "embedding_file_bytes": 0,
        "head_file_bytes": 0,
        "warnings": (),
    }
    assert replace(read, **from_tensors) == open_geometry(name)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("a book", "source must be dict"),
        ({"author": "me"}, r"source\.author is unknown; known: says, config"),
        ({"says": "a book"}, r"source\.says must be list"),
        ({"says": [3]}, r"source\.says\[0\] must be str"),
        ({"config": []}, r"source\.config must be dict"),
    ],
)
def test_a_source_is_read_strictly(source, says):
    layer = {"kind": "short_conv", "conv_channels": 8, "conv_kernel": 3}
    document = {"schema": "memkv-pp/geometry/1", "layers": [layer], "source": source}
    with pytest.raises(GeometryError, match=says):
        geometry_from_json(document, "t")
