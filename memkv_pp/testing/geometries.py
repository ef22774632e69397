"""Known models as geometries, for tests and examples: no file is read.

The shapes are those of ``dual-cache-and-pipeline.md`` 3.2 to 3.4, whose byte figures they
reproduce. Weights are left out.
"""

from memkv_pp.errors import GeometryError
from memkv_pp.geometry import LayerGeometry, LayerKind, ModelGeometry


def full_layer(kv_heads: int, head_size: int) -> LayerGeometry:
    """A full-attention layer with equal K and V heads."""
    return LayerGeometry(
        kind=LayerKind.FULL,
        query_heads=kv_heads,
        kv_heads=kv_heads,
        key_head_size=head_size,
        value_head_size=head_size,
    )


def sliding_layer(kv_heads: int, head_size: int, window: int) -> LayerGeometry:
    """A sliding-attention layer with equal K and V heads."""
    return LayerGeometry(
        kind=LayerKind.SLIDING,
        query_heads=kv_heads,
        kv_heads=kv_heads,
        key_head_size=head_size,
        value_head_size=head_size,
        window=window,
    )


def recurrent_layer(
    *, key_groups: int, value_heads: int, state_size: int, conv_kernel: int = 4
) -> LayerGeometry:
    """A gated delta-net layer: ``state_size`` squared f32 elements per value head."""
    return LayerGeometry(
        kind=LayerKind.RECURRENT,
        conv_channels=2 * state_size * key_groups + state_size * value_heads,
        conv_kernel=conv_kernel,
        state_elements=state_size * state_size * value_heads,
    )


def latent_layer(latent_size: int, rope_size: int) -> LayerGeometry:
    """A latent-attention (MLA) layer."""
    return LayerGeometry(
        kind=LayerKind.LATENT, query_heads=1, latent_size=latent_size, rope_size=rope_size
    )


def shared_layer(source_layer: int) -> LayerGeometry:
    """A layer that reads the cache of ``source_layer``."""
    return LayerGeometry(kind=LayerKind.SHARED, query_heads=1, source_layer=source_layer)


def qwen_hybrid(name: str, num_layers: int, *, kv_heads: int, value_heads: int) -> ModelGeometry:
    """Three gated delta-net layers to one full-attention layer, and one NextN layer."""
    full = full_layer(kv_heads, 256)
    recurrent = recurrent_layer(key_groups=16, value_heads=value_heads, state_size=128)
    return ModelGeometry(
        name=name,
        family="qwen3_5",
        layers=tuple(recurrent if (i + 1) % 4 else full for i in range(num_layers)),
        nextn_layers=(full,),
        context_tokens=262_144,
    )


def gemma4(
    name: str,
    num_layers: int,
    *,
    window_heads: int,
    global_heads: int,
    window: int,
    num_shared: int = 0,
) -> ModelGeometry:
    """Five sliding layers (head 256) to one global layer (head 512); the last ones share.

    A shared sliding layer reads the last sliding layer with a cache of its own, a shared global
    layer the last such global layer.
    """
    own = num_layers - num_shared
    layers: list[LayerGeometry] = []
    for i in range(num_layers):
        is_global = (i + 1) % 6 == 0
        if i >= own:
            layers.append(shared_layer(own - 1 if is_global else own - 2))
        elif is_global:
            layers.append(full_layer(global_heads, 512))
        else:
            layers.append(sliding_layer(window_heads, 256, window))
    return ModelGeometry(name=name, family="gemma4", layers=tuple(layers), context_tokens=131_072)


def step_flash() -> ModelGeometry:
    """Step-3.5-Flash: full attention at every fourth layer, window 512; one sliding NextN layer."""
    full, sliding = full_layer(8, 128), sliding_layer(8, 128, 512)
    return ModelGeometry(
        name="step-3.5-flash",
        family="step3",
        layers=tuple(sliding if i % 4 else full for i in range(45)),
        nextn_layers=(sliding,),
        context_tokens=262_144,
    )


_KNOWN = {
    geometry.name: geometry
    for geometry in (
        qwen_hybrid("qwen3.5-9b", 32, kv_heads=4, value_heads=32),
        qwen_hybrid("qwen3.5-27b", 64, kv_heads=4, value_heads=48),
        qwen_hybrid("qwen3.5-35b-a3b", 40, kv_heads=2, value_heads=32),
        gemma4("gemma4-e4b", 42, window_heads=2, global_heads=2, window=512, num_shared=18),
        gemma4("gemma4-26b", 30, window_heads=8, global_heads=2, window=1024),
        gemma4("gemma4-31b", 60, window_heads=16, global_heads=4, window=1024),
        step_flash(),
    )
}

KNOWN_NAMES = tuple(_KNOWN)


def known_geometry(name: str) -> ModelGeometry:
    """The geometry called ``name``; GeometryError lists the names there are."""
    if name not in _KNOWN:
        raise GeometryError(f"unknown geometry {name!r}", f"known: {', '.join(KNOWN_NAMES)}")
    return _KNOWN[name]
