"""R4 of the field's lessons: stages without attention admit, free and abort like any other."""

import pytest

from memkv_pp.admission.coordinator import Coordinator, CoordinatorConfig
from memkv_pp.admission.ledger import Ledger
from memkv_pp.config import units_for_sequences
from memkv_pp.fence import explicit
from memkv_pp.formats import DEFAULT_PAIR
from memkv_pp.geometry import ModelGeometry
from memkv_pp.sizing import CacheOptions, Footprint, size_fence
from memkv_pp.testing.fakes import FakeStages
from memkv_pp.testing.geometries import full_layer, latent_layer, recurrent_layer
from memkv_pp.testing.stepped import SteppedPipeline
from memkv_pp.wire import Arrived, Cancelled, Request

RECURRENT = recurrent_layer(key_groups=2, value_heads=4, state_size=16, conv_kernel=4)


def every_fourth_attends():
    layers = tuple(full_layer(2, 64) if i % 4 == 3 else RECURRENT for i in range(48))
    return ModelGeometry(name="every fourth", family="test", layers=layers), (0, 2, 18, 34, 48)


def one_latent_at_the_end():
    layers = (RECURRENT, RECURRENT, RECURRENT, latent_layer(64, 32))
    return ModelGeometry(name="three and one", family="test", layers=layers), (0, 2, 4)


@pytest.mark.parametrize("case", [every_fourth_attends, one_latent_at_the_end])
def test_a_stage_without_attention_admits_frees_and_aborts_like_any_other(case):
    geometry, cuts = case()
    formats = (DEFAULT_PAIR,) * geometry.num_layers
    sizings = size_fence(geometry, formats, explicit(cuts, geometry.num_layers), CacheOptions())
    assert sizings[0].bytes_per_token == 0
    assert sizings[0].footprint(1) == sizings[0].footprint(5000) == Footprint(0, 0, 2)
    assert sizings[-1].bytes_per_token > 0
    assert {sizing.options.block_tokens for sizing in sizings} == {16}
    units = units_for_sequences(sizings, 40, 2)
    pipeline = SteppedPipeline(
        Coordinator(Ledger(sizings, units), CoordinatorConfig(waves=2, prefill_chunk=16)),
        FakeStages(sizings, units),
    )
    pipeline.start()
    for request in range(3):
        pipeline.handle(Arrived(Request(request=request, prompt=(1,) * 30, max_new=11)))
    assert pipeline.coordinator.statistics().waiting == 1, "two hold all the state slots"
    held = pipeline.coordinator.ledger.statistics().held_bytes
    assert held[0] == 2 * sizings[0].bytes_per_sequence
    pipeline.handle(Cancelled(1))
    pipeline.drain()
    assert [len(pipeline.tokens.get(request, ())) for request in (0, 2)] == [11, 11]
    assert sorted(pipeline.released) == [0, 1, 2]
    assert pipeline.coordinator.ledger.statistics().held_bytes == (0,) * len(sizings)


def test_state_slots_that_run_out_are_named_with_their_stage():
    geometry, cuts = every_fourth_attends()
    formats = (DEFAULT_PAIR,) * geometry.num_layers
    sizings = size_fence(geometry, formats, explicit(cuts, geometry.num_layers), CacheOptions())
    units = [Footprint(100, 0, 2 if sizing.stage != 2 else 1) for sizing in sizings]
    short = Ledger(sizings, units).never_fits(10)
    assert [stage.stage for stage in short] == [0, 1, 2, 3]
    assert short[2].have_bytes == sizings[2].slot_bytes
    assert short[2].need_bytes == 2 * sizings[2].slot_bytes
