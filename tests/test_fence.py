import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_pp.errors import FenceError
from memkv_pp.fence import Fence, even, explicit
from memkv_pp.testing.geometries import known_geometry

splits = st.tuples(st.integers(1, 60), st.integers(1, 12)).filter(lambda pair: pair[1] <= pair[0])


@pytest.mark.parametrize(
    ("layers", "stages", "cuts"),
    [
        (32, 2, (0, 16, 32)),
        (32, 4, (0, 8, 16, 24, 32)),
        (32, 3, (0, 10, 21, 32)),
        (45, 2, (0, 22, 45)),
        (64, 2, (0, 32, 64)),
        (40, 4, (0, 10, 20, 30, 40)),
        (5, 5, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_even_cuts_lie_at_the_floor_of_equal_shares(layers, stages, cuts):
    assert even(layers, stages).cuts == cuts


@pytest.mark.parametrize(("layers", "stages"), [(94, 8), (61, 8), (10, 3), (48, 4), (5, 5)])
def test_no_remainder_piles_up_on_the_last_stage(layers, stages):
    fence = even(layers, stages)
    owned = [len(fence.layers_of(stage)) for stage in range(stages)]
    assert sum(owned) == layers
    assert max(owned) - min(owned) <= 1


@pytest.mark.parametrize(("layers", "stages"), [(4, 5), (4, 0), (4, -1), (0, 1)])
def test_more_stages_than_layers_or_none_is_refused_with_both_numbers(layers, stages):
    with pytest.raises(FenceError, match=f"--stages: {layers} layers cannot make {stages} stages"):
        even(layers, stages)


@given(splits)
def test_an_even_fence_owns_every_layer_once_and_in_order(split):
    fence = even(*split)
    owned = [layer for stage in range(fence.num_stages) for layer in fence.layers_of(stage)]
    assert owned == list(range(split[0]))
    sizes = [len(fence.layers_of(stage)) for stage in range(fence.num_stages)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.slow
@given(st.data())
def test_the_stage_of_a_layer_is_what_a_linear_scan_finds(data):
    layers, stages = data.draw(splits)
    inner = data.draw(
        st.lists(st.integers(1, max(layers - 1, 1)), unique=True, max_size=stages - 1)
    )
    fence = Fence((0, *sorted(cut for cut in inner if cut < layers), layers))
    for layer in range(layers + 3):
        owners = [s for s in range(fence.num_stages) if layer in fence.layers_of(s)]
        assert fence.stage_of(layer) == (owners[0] if owners else fence.num_stages - 1)


@pytest.mark.parametrize(
    ("cuts", "says"),
    [
        ((), "start at 0"),
        ((0,), "start at 0"),
        ((1, 4), "start at 0"),
        ((0, 0, 4), "strictly increasing"),
        ((0, 2, 2, 4), "strictly increasing"),
        ((0, 3, 2, 4), "strictly increasing"),
        ((0, -1, 4), "strictly increasing"),
    ],
)
def test_a_fence_with_an_empty_or_backward_stage_is_refused(cuts, says):
    with pytest.raises(FenceError, match=says):
        Fence(cuts)


def test_a_written_fence_must_end_at_the_last_layer_and_make_the_stages_asked_for():
    assert explicit([0, 16, 48], 48, 2).num_stages == 2
    with pytest.raises(FenceError, match="ends at 47, the model has 48 layers"):
        explicit([0, 16, 47], 48)
    with pytest.raises(FenceError, match="makes 2 stages, 3 were asked for"):
        explicit([0, 16, 48], 48, 3)


def test_stages_and_layers_that_do_not_exist_are_refused():
    with pytest.raises(FenceError, match="stage 2"):
        even(4, 2).layers_of(2)
    with pytest.raises(FenceError, match="-1"):
        even(4, 2).stage_of(-1)


def test_a_cut_between_a_shared_layer_and_its_source_names_both_layers():
    edges = known_geometry("gemma4-e4b").shared_edges()
    assert len(edges) == 18
    with pytest.raises(FenceError, match="layer 24 reads the cache of layer 22"):
        Fence((0, 23, 42)).check_edges(edges)
    Fence((0, 22, 42)).check_edges(edges)
