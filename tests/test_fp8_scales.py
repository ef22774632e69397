"""Scales of fp8 caches: read from a checkpoint, calibrated, and the same in every operation."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from memkv_pp.cache import host_attention, host_kernels, ops
from memkv_pp.cache.device import TorchDevice
from memkv_pp.cache.kv import StageCache
from memkv_pp.cli import app
from memkv_pp.errors import ConfigError, ModelError
from memkv_pp.fence import even
from memkv_pp.formats import parse_format, parse_pair
from memkv_pp.fp8_scales import UNIT_SCALES, Fp8Scales, calibrated_scale
from memkv_pp.geometry import uniform_geometry
from memkv_pp.model.kv_scales import checkpoint_scales, choose_fp8_scales
from memkv_pp.packing import pack_group, unpack_group
from memkv_pp.sizing import CacheOptions, Footprint, size_fence
from memkv_pp.testing.tiny_models import write_tiny_model
from memkv_pp.wire import Rows

HEADS, SIZE, LAYERS = 2, 32, 3
FP8 = parse_pair("fp8:fp8")
ATTENTION = "model.layers.{}.self_attn."
# E4M3 keeps 4 significant bits: half a step is 2^-4 of the value.
ROUNDING = 2.0**-4
SIDEWAYS = {
    "k": ("k_scale", "attn.k_scale", "k_proj.k_scale", "qkv_proj.k_scale", "k_proj.output_scale"),
    "v": ("v_scale", "attn.v_scale", "v_proj.v_scale", "qkv_proj.v_scale", "v_proj.output_scale"),
}
E4M3_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["host", "torch"])
def codecs(request, monkeypatch):
    """Both ways rows are packed; the torch one as on a machine without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(host_kernels, "loaded", lambda: None)
    elif host_kernels.load() is None:
        pytest.skip(f"no host kernels: {host_kernels.status().found}")
    return request.param


def make_cache(pair="fp8:fp8", attention=None, fp8_scales=UNIT_SCALES):
    model = uniform_geometry(2, kv_heads=HEADS, head_size=SIZE)
    formats = (parse_pair(pair),) * 2
    (sizing,) = size_fence(model, formats, even(2, 1), CacheOptions())
    cache = StageCache(
        TorchDevice(),
        model,
        sizing,
        Footprint(8, 0, 0),
        max_sequences=2,
        attention=attention,
        fp8_scales=fp8_scales,
    )
    cache.arena.storage.fill_(0xFF)
    return cache


def a_view(scales, layer=0):
    return make_cache(fp8_scales=scales).layers.views[layer]


def append(side, values, records=None):
    count = len(values)
    records = torch.zeros(count, dtype=torch.int64) if records is None else records
    ops.append(side, records, torch.arange(count), values)


def test_a_calibrated_scale_puts_the_largest_magnitude_at_448():
    assert calibrated_scale(448.0) == 1.0
    assert calibrated_scale(4480.0) == 10.0
    assert [calibrated_scale(x) for x in (0.0, math.nan, math.inf, 1e-40)] == [1.0] * 4


def test_scales_that_cannot_scale_are_refused():
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="fp8 scale"):
            Fp8Scales(layers=((1.0, scale),))
    with pytest.raises(ConfigError, match="--fp8-scales"):
        Fp8Scales(layers=((1.0, 1.0),), calibration_rows=4)


def test_rows_are_stored_and_read_with_the_scale_of_their_layer_and_side(codecs):
    scales = Fp8Scales(layers=((1.0, 1.0), (8.0, 0.25)))
    view = a_view(scales, layer=1)
    rows = torch.randn(3, HEADS, SIZE, generator=torch.Generator().manual_seed(1)) * 900
    fmt = parse_format("fp8")
    for side, scale in ((view.k, 8.0), (view.v, 0.25)):
        append(side, rows)
        found = ops.gather(side, torch.tensor([0]), torch.float32)[:, :3]
        for t, h, d in ((0, 0, 0), (1, 1, 5), (2, 0, 31)):
            codes, none = pack_group(fmt, [float(rows[t, h, d])], scale=scale)
            assert int(side.codes[0, h, t, d]) == codes[0]
            assert found[h, t, d] == unpack_group(fmt, codes, none, scale=scale)[0]


def test_calibration_takes_the_first_rows_that_are_stored_and_then_stays(codecs):
    view = a_view(Fp8Scales(calibration_rows=2))
    rows = torch.ones(4, HEADS, SIZE)
    rows[0] = 9e4  # its record is negative: never stored
    rows[2, 1, 7] = -896.0
    rows[3] = 4480.0  # past the first two that are stored
    append(view.k, rows, torch.tensor([-1, 0, 0, 0]))
    assert view.k.fp8.value == 2.0
    append(view.k, rows * 100)
    assert view.k.fp8.value == 2.0
    assert view.v.fp8.value == 1.0, "a side that has no rows yet waits for its own"
    append(view.v, rows[1:2] * 1792)
    assert view.v.fp8.value == 4.0


def test_a_call_that_stores_nothing_leaves_calibration_to_the_next():
    view = a_view(Fp8Scales(calibration_rows=2))
    rows = torch.full((1, HEADS, SIZE), 896.0)
    append(view.k, rows * 7, torch.tensor([-1]))
    append(view.k, rows[:0])
    append(view.k, rows)
    assert view.k.fp8.value == 2.0


def test_other_formats_are_never_calibrated():
    view = make_cache("q8_0:fp8", fp8_scales=Fp8Scales(calibration_rows=2)).layers.views[0]
    rows = torch.full((1, HEADS, SIZE), 896.0)
    append(view.k, rows)
    append(view.v, rows)
    assert (view.k.fp8.value, view.v.fp8.value) == (1.0, 2.0)


@pytest.mark.parametrize("packed", [True, False])
def test_large_keys_are_clipped_at_a_scale_of_one_and_kept_when_calibrated(packed):
    """Keys and values of up to about 3,000: at 1.0 they saturate at 448, and none becomes NaN."""
    if packed and host_kernels.load() is None:
        pytest.skip(f"no host kernels: {host_kernels.status().found}")
    generator = torch.Generator().manual_seed(2)
    key, value = (torch.randn(20, HEADS, SIZE, generator=generator) * 1000 for _ in "kv")
    query = torch.randn(20, HEADS, SIZE, generator=generator) / 1000

    def attend(pair, scales):
        attention = host_attention.loaded() if packed else None
        cache = make_cache(pair, attention, scales)
        cache.open(0)
        batch = cache.extend([Rows(0, 0, 20, sample=True)])
        return cache.layers.attend(1, batch, query, key, value, 0.2, fixed=False)

    exact = attend("f32:f32", UNIT_SCALES)
    one, calibrated = (
        attend("fp8:fp8", scales) for scales in (UNIT_SCALES, Fp8Scales(calibration_rows=20))
    )
    stated = attend("fp8:fp8", Fp8Scales(layers=((9.0, 9.0),) * 2))
    assert one.isfinite().all()
    assert one.abs().max() <= 448
    assert exact.abs().max() > 1500
    for scaled in (calibrated, stated):
        error = (scaled - exact).norm() / exact.norm()
        assert error < ROUNDING < 4 * ROUNDING < (one - exact).norm() / exact.norm()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("plain"), "llama", layers=LAYERS)


@pytest.fixture
def with_tensors(plain, tmp_path):
    """Callable: the tiny model with more tensors and other settings in its files."""

    def write(tensors, quantization=None, sidecar=None):
        for file in plain.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        weights = load_file(tmp_path / "model.safetensors")
        more = {name: torch.as_tensor(value) for name, value in tensors.items()}
        save_file(weights | more, tmp_path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((tmp_path / "config.json").read_text())
        if quantization is not None:
            config["quantization_config"] = quantization
            (tmp_path / "config.json").write_text(json.dumps(config))
        if sidecar is not None:
            (tmp_path / "hf_quant_config.json").write_text(json.dumps(sidecar))
        return tmp_path

    return write


def all_scales(k, v):
    return {
        ATTENTION.format(layer) + name: value
        for layer in range(LAYERS)
        for name, value in (("k_scale", k), ("v_scale", v))
    }


@pytest.mark.parametrize("place", range(len(SIDEWAYS["k"])))
def test_every_name_that_engines_write_is_read(with_tensors, place):
    names = {side: ATTENTION.format(1) + SIDEWAYS[side][place] for side in "kv"}
    folder = with_tensors({names["k"]: torch.tensor([0.5]), names["v"]: torch.tensor(2.0)})
    assert checkpoint_scales(folder) == {(1, "k"): 0.5, (1, "v"): 2.0}


def test_one_scale_for_both_sides_is_read(with_tensors):
    folder = with_tensors({ATTENTION.format(2) + "kv_scale": torch.tensor(0.5)})
    assert checkpoint_scales(folder) == {(2, "k"): 0.5, (2, "v"): 0.5}


def test_the_same_scale_twice_is_one_and_another_is_a_conflict(with_tensors):
    twice = {ATTENTION.format(0) + name: 0.5 for name in ("k_scale", "k_proj.output_scale")}
    assert checkpoint_scales(with_tensors(twice)) == {(0, "k"): 0.5}
    conflict = twice | {ATTENTION.format(0) + "k_scale": 0.25}
    with pytest.raises(ModelError, match=r"k_scale is 0\.25, but .*k_proj\.output_scale .* 0\.5"):
        checkpoint_scales(with_tensors(conflict))


@pytest.mark.parametrize("value", [0.0, -0.5, math.inf, math.nan, 1e-45, [0.5, 0.5]])
def test_a_scale_that_cannot_scale_names_its_tensor(with_tensors, value):
    folder = with_tensors({ATTENTION.format(1) + "v_scale": torch.tensor(value)})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn\.v_scale"):
        checkpoint_scales(folder)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("num_bits", 4), ("type", "int"), ("strategy", "attn_head"), ("dynamic", True)],
)
def test_scales_of_another_scheme_are_refused_by_its_setting(with_tensors, setting, value):
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {setting: value}}
    with pytest.raises(ModelError, match=rf"kv_cache_scheme\.{setting} = {value!r}"):
        checkpoint_scales(with_tensors(all_scales(0.5, 2.0), scheme))


def test_modelopt_scales_of_nvfp4_caches_are_refused(with_tensors):
    sidecar = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "NVFP4"}}
    with pytest.raises(ModelError, match="kv_cache_quant_algo = 'NVFP4'"):
        checkpoint_scales(with_tensors(all_scales(0.5, 2.0), sidecar=sidecar))


def test_choices_take_scales_from_where_they_say(with_tensors, plain):
    formats = (FP8, parse_pair("q8_0:fp8"), parse_pair("bf16:bf16"))
    folder = with_tensors(all_scales(0.5, 2.0))
    found = Fp8Scales(layers=((0.5, 2.0), (1.0, 2.0), (1.0, 1.0)))
    assert choose_fp8_scales(None, folder, formats) == found
    assert choose_fp8_scales("checkpoint", folder, formats) == found
    assert choose_fp8_scales("one", folder, formats) == UNIT_SCALES
    assert choose_fp8_scales("calibrate:64", folder, formats) == Fp8Scales(calibration_rows=64)
    assert choose_fp8_scales(None, plain, formats) == UNIT_SCALES
    assert choose_fp8_scales("checkpoint", plain, formats[2:]) == UNIT_SCALES
    with pytest.raises(ModelError, match="no K scale for layer 0"):
        choose_fp8_scales("checkpoint", plain, formats)
    for wrong in ("calibrate", "calibrate:0", "calibrate:-1", "first", ""):
        with pytest.raises(ConfigError, match="--fp8-scales"):
            choose_fp8_scales(wrong, plain, formats)


def test_a_gguf_file_has_no_scales(tmp_path):
    assert checkpoint_scales(tmp_path / "model.gguf") == {}


def test_calibration_is_refused_with_deterministic(run_pipeline, plain):
    with pytest.raises(ConfigError, match="--fp8-scales calibrate with --deterministic"):
        run_pipeline(plain, [[1, 2]], kv="fp8", deterministic=True, fp8_scales="calibrate:8")


@pytest.fixture
def loud(with_tensors):
    """Callable: the tiny model with keys a thousand times larger, and queries as much smaller.

    Its f32 scores are those of the model as it was.
    """

    def write(tensors=None, quantization=None):
        folder = with_tensors(tensors or {}, quantization)
        weights = load_file(folder / "model.safetensors")
        for layer in range(LAYERS):
            weights[ATTENTION.format(layer) + "k_proj.weight"] *= 1024
            weights[ATTENTION.format(layer) + "q_proj.weight"] /= 1024
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return write


PROMPTS = [list(range(3, 40)), [7, 7, 9]]


def tokens(report):
    return [completion.tokens for completion in report.completions]


@pytest.mark.slow
def test_calibrated_scales_serve_keys_that_a_scale_of_one_clips(run_pipeline, loud):
    folder = loud()
    exact, one, calibrated = (
        tokens(run_pipeline(folder, PROMPTS[:1], kv=kv, fp8_scales=choice, max_new=6))
        for kv, choice in (("f32", None), ("fp8", "one"), ("fp8", "calibrate:64"))
    )
    assert calibrated[0][:2] == exact[0][:2]
    assert one != calibrated


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["calibrate:5", "checkpoint", None])
def test_scales_belong_to_layers_wherever_the_fence_cuts(run_pipeline, loud, choice):
    tensors = {
        ATTENTION.format(layer) + f"{side}_scale": (4.0 + layer if side == "k" else 0.5)
        for layer in range(LAYERS)
        for side in "kv"
    }
    folder = loud(
        tensors,
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": E4M3_SCHEME},
    )
    whole = run_pipeline(folder, PROMPTS, kv="fp8", fp8_scales=choice)
    cut = run_pipeline(folder, PROMPTS, kv="fp8", fp8_scales=choice, stages=3, waves=2)
    assert tokens(cut) == tokens(whole)
    assert tokens(whole) != tokens(run_pipeline(folder, PROMPTS, kv="fp8", fp8_scales="one"))


@pytest.mark.slow
def test_the_command_line_warns_of_scales_of_one_and_of_a_choice_without_fp8(with_tensors, capsys):
    folder = with_tensors({ATTENTION.format(0) + name: 0.5 for name in ("k_scale", "v_scale")})

    def said(*words):
        assert app.main(["generate", str(folder), "--prompt", "a", "--max-new", "2", *words]) == 0
        return capsys.readouterr().err

    assert "layers 1, 2 use a scale of 1.0" in said("--kv", "fp8")
    assert "layers 0, 1, 2 use a scale of 1.0" in said("--kv", "fp8", "--fp8-scales", "one")
    assert "scale of 1.0" not in said("--kv", "fp8", "--fp8-scales", "calibrate:4")
    assert "no layer's cache is fp8" in said("--kv", "bf16", "--fp8-scales", "one")


def test_quantised_weights_are_still_refused(run_pipeline, with_tensors):
    groups = {"group_0": {"weights": {"num_bits": 8}}}
    for quantization in (
        {"quant_method": "compressed-tensors", "config_groups": groups},
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": E4M3_SCHEME},
        {"quant_method": "gptq", "bits": 4},
    ):
        folder = with_tensors({}, quantization)
        report = run_pipeline(folder, [[1]], max_new=1)
        assert "quantised matrix products" in str(report.completions[0].error)
