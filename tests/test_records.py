import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_pp.errors import FormatError
from memkv_pp.formats import FORMATS, Pair, parse_pair
from memkv_pp.records import (
    FLAT_TAIL_BYTES,
    PART_ALIGNMENT,
    RECORD_ALIGNMENT,
    Part,
    RecordLayout,
    record_layout,
    state_layout,
)
from memkv_pp.testing.geometries import full_layer, latent_layer, recurrent_layer

formats = st.sampled_from(sorted(FORMATS)).map(FORMATS.__getitem__)
stored_layers = st.lists(
    st.tuples(
        st.builds(full_layer, st.integers(1, 5), st.sampled_from([64, 128, 256]))
        | st.builds(latent_layer, st.just(64), st.just(64)),
        st.builds(Pair, formats, formats),
    ),
    min_size=1,
    max_size=4,
).map(lambda layers: [(3 + i, layer, pair) for i, (layer, pair) in enumerate(layers)])


def parts_of(layout: RecordLayout) -> list[Part]:
    sides = [side for layer in layout.layers for side in (layer.k, layer.v) if side is not None]
    return [part for side in sides for part in (side.codes, side.scales, side.exponents)]


@pytest.mark.slow
@given(stored_layers, st.integers(1, 40), st.sampled_from([0, FLAT_TAIL_BYTES]))
def test_the_parts_of_a_record_are_aligned_apart_and_add_up_to_its_payload(layers, rows, tail):
    layout = record_layout(layers, rows, tail_bytes=tail)
    assert layout is not None
    parts = [part for part in parts_of(layout) if part.num_bytes]
    assert all(part.offset % PART_ALIGNMENT == 0 for part in parts)
    ends = [part.offset + part.num_bytes for part in parts]
    assert all(end <= part.offset for end, part in zip(ends, parts[1:], strict=False))
    assert ends[-1] + tail <= layout.record_bytes
    assert layout.record_bytes % RECORD_ALIGNMENT == 0
    assert sum(part.num_bytes for part in parts) == layout.payload_bytes
    assert layout.padding_bytes == layout.record_bytes - layout.payload_bytes >= 0


@pytest.mark.slow
@given(stored_layers, st.integers(1, 40))
def test_a_records_payload_is_what_the_formats_say_plus_one_exponent_per_head(layers, rows):
    layout = record_layout(layers, rows)
    assert layout is not None
    expected = 0
    for _, layer, pair in layers:
        for fmt, (heads, size) in ((pair.k, layer.key_row), (pair.v, layer.value_row)):
            if heads:
                expected += heads * (rows * fmt.row_bytes(size) + fmt.exponent)
    assert layout.payload_bytes == expected


def test_a_default_record_lies_as_drawn():
    layout = record_layout([(0, full_layer(4, 256), parse_pair("q8_0:q5_1"))], 16)
    assert layout is not None
    assert layout.layers[0].k.codes == Part(0, 4, 16, 256)
    assert layout.layers[0].k.scales == Part(16_384, 4, 16, 16)
    assert layout.layers[0].v is not None
    assert layout.layers[0].v.codes == Part(17_408, 4, 16, 160)
    assert layout.layers[0].v.scales == Part(27_648, 4, 16, 32)
    assert layout.record_bytes == layout.payload_bytes == 16 * 1856


def test_latent_attention_has_no_v_side():
    layout = record_layout([(0, latent_layer(512, 64), parse_pair("f32"))], 16)
    assert layout is not None
    assert layout.layers[0].v is None
    assert layout.payload_bytes == 16 * 576 * 4


def test_a_head_size_that_the_format_cannot_hold_is_refused_by_name():
    with pytest.raises(FormatError, match="q8_0 cannot hold a head size of 80"):
        record_layout([(0, full_layer(8, 80), parse_pair("q8_0"))], 16)


def test_no_layers_make_no_record_and_no_slot():
    assert record_layout([], 16) is None
    assert state_layout([]) is None


@pytest.mark.slow
@given(
    st.lists(
        st.builds(
            recurrent_layer,
            key_groups=st.integers(1, 3),
            value_heads=st.integers(1, 3),
            state_size=st.integers(1, 9),
            conv_kernel=st.integers(1, 4),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_the_states_of_a_slot_are_aligned_apart_and_add_up(layers):
    slot = state_layout(list(enumerate(layers)))
    assert slot is not None
    end = 0
    for laid in slot.layers:
        assert laid.conv_offset % PART_ALIGNMENT == laid.state_offset % PART_ALIGNMENT == 0
        assert end <= laid.conv_offset
        assert laid.conv_offset + 4 * laid.conv_elements <= laid.state_offset
        end = laid.state_offset + 4 * laid.state_elements
    assert end <= slot.slot_bytes
    assert slot.slot_bytes % RECORD_ALIGNMENT == 0
    assert slot.payload_bytes == 4 * sum(x.conv_elements + x.state_elements for x in layers)
