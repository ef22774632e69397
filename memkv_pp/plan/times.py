"""How long a decode step takes on a stage: the textbook roofline, from a device profile.

::

    stage seconds = max(bytes moved / bandwidth, operations / peak) + link seconds
    link seconds  = latency + hidden rows x hidden_size x dtype_bytes / link bandwidth

    bytes moved   the stage's weights once, for all sequences together: its layers, and on the last
                  stage the norm and the head (the first stage reads one embedding row per token);
                  per sequence the live rows of its context (a sliding layer's at most its window,
                  a shared layer's are its source's), the new rows, and each recurrent state in and
                  out
    operations    2 per weight and row; 2 x query heads x live rows x (key + value width) per row
                  and attention layer; 7 per state element and row (decay, two products with the
                  state, one rank-one update)

A step runs ``1 + spec_tokens`` rows per sequence. Assumptions: the device reaches the profile's
figures, a packed cache is read as it lies and costs nothing to unpack, sending does not overlap
computing, and a mixture of experts reads every expert, since the geometry counts all its weights.
A drafter's own passes, sampling and the host's part are left out. So it is the least time the
profile allows a dense model, and a basis for comparing fences more than a forecast.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memkv_pp.errors import ConfigError
from memkv_pp.fence import Fence
from memkv_pp.formats import Pair
from memkv_pp.geometry import LayerGeometry, LayerKind, ModelGeometry
from memkv_pp.plan.profiles import DeviceProfile
from memkv_pp.sizing import CacheOptions, layer_bytes_per_token, layer_context_bytes

OPERATIONS_PER_WEIGHT = 2
OPERATIONS_PER_STATE_ELEMENT = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTimes:
    """Predicted seconds of a fence; see the module for what they assume.

    ``stage_seconds``: one decode step of each stage for a wave, its link to the next stage
    included. ``link_seconds``: that link alone, 0 on the last stage. ``token_seconds``: one token
    of a sequence that runs alone, all stages one after another. ``step_seconds``: the time from
    step to step in the steady state, which is the slowest stage's. ``waves`` groups of at most
    ``wave_sequences`` sequences are under way; ``tokens_per_s`` counts one token per sequence and
    step for all of them.
    """

    waves: int
    wave_sequences: int
    stage_seconds: tuple[float, ...]
    link_seconds: tuple[float, ...]
    token_seconds: float
    step_seconds: float
    tokens_per_s: float

    @property
    def slowest_stage(self) -> int:
        """The stage that sets ``step_seconds``; the first of equals."""
        return self.stage_seconds.index(max(self.stage_seconds))


def stage_seconds(
    geometry: ModelGeometry,
    formats: Sequence[Pair],
    layers: range,
    profile: DeviceProfile,
    *,
    first: bool,
    last: bool,
    context_tokens: int,
    sequences: int,
    dtype_bytes: int,
    options: CacheOptions,
) -> float:
    """Seconds of one decode step of the trunk ``layers``, the link to the next stage included.

    ``formats`` has a pair per layer. ``first`` and ``last`` say which end of the pipeline the
    stage is; the last has no link. ``context_tokens`` is what each of ``sequences`` has cached.
    The link is ``profile``'s: ``linked`` lowers it where the next device's is slower.
    """
    moved_bytes, operations = stage_work(
        geometry,
        formats,
        layers,
        first=first,
        last=last,
        context_tokens=context_tokens,
        sequences=sequences,
        dtype_bytes=dtype_bytes,
        options=options,
    )
    seconds = max(
        moved_bytes / profile.bandwidth_bytes_per_s, operations / profile.peak(dtype_bytes)
    )
    rows = sequences * (1 + options.spec_tokens)
    return seconds + (0.0 if last else link_seconds(geometry, profile, rows, dtype_bytes))


def stage_work(
    geometry: ModelGeometry,
    formats: Sequence[Pair],
    layers: range,
    *,
    first: bool,
    last: bool,
    context_tokens: int,
    sequences: int,
    dtype_bytes: int,
    options: CacheOptions,
) -> tuple[int, int]:
    """(bytes moved, operations) of the step that ``stage_seconds`` times; sums over its layers."""
    rows = sequences * (1 + options.spec_tokens)
    moved_bytes = dtype_bytes * rows * geometry.hidden_size if first else 0
    operations = 0
    weights = sum(geometry.layers[i].weight_elements for i in layers)
    if last:
        head = geometry.embedding_elements if geometry.tied_embedding else geometry.head_elements
        weights += geometry.norm_elements + head
    moved_bytes += dtype_bytes * weights
    operations += OPERATIONS_PER_WEIGHT * weights * rows
    for own, stored, pair in _read_by(geometry, formats, layers):
        live_bytes = layer_context_bytes(stored, pair, context_tokens)
        if own.kind.has_state:
            moved_bytes += sequences * 2 * live_bytes
        else:
            moved_bytes += sequences * live_bytes
            if own is stored:
                moved_bytes += rows * sum(layer_bytes_per_token(stored, pair))
        operations += rows * _cache_operations(own, stored, context_tokens)
    return moved_bytes, operations


def link_seconds(
    geometry: ModelGeometry, profile: DeviceProfile, rows: int, dtype_bytes: int
) -> float:
    """Seconds to send ``rows`` hidden rows from a device with ``profile``'s link."""
    sent_bytes = rows * geometry.hidden_size * dtype_bytes
    return profile.link_latency_s + sent_bytes / profile.link_bytes_per_s


def linked(profiles: Sequence[DeviceProfile]) -> tuple[DeviceProfile, ...]:
    """The profiles in order of their stages, each link lowered to the next device's if slower."""
    return tuple(
        replace(
            here,
            link_bytes_per_s=min(here.link_bytes_per_s, there.link_bytes_per_s),
            link_latency_s=max(here.link_latency_s, there.link_latency_s),
        )
        for here, there in zip(profiles, (*profiles[1:], profiles[-1]), strict=True)
    )


def predict(
    geometry: ModelGeometry,
    formats: Sequence[Pair],
    fence: Fence,
    profiles: Sequence[DeviceProfile],
    *,
    context_tokens: int,
    sequences: int,
    dtype_bytes: int,
    options: CacheOptions,
    waves: int | None = None,
) -> PipelineTimes:
    """Predict decoding of ``sequences``, each with ``context_tokens`` cached, over ``fence``.

    ``profiles`` has one per stage, ConfigError naming --device-profile otherwise. ``waves``
    defaults to one per stage, and there are never more than sequences. A round, in which every
    sequence gets a token, takes ``waves x slowest stage``, or the sum of the stages where that is
    longer because there are fewer waves than stages.
    """
    if len(profiles) != fence.num_stages:
        raise ConfigError(
            f"--device-profile: {len(profiles)} profiles for {fence.num_stages} stages",
            "give --device-profile once, or once per stage",
        )
    waves = max(1, min(sequences, waves or fence.num_stages))
    wave_sequences = max(1, -(-sequences // waves))
    chain = linked(profiles)

    def seconds(count: int) -> tuple[float, ...]:
        return tuple(
            stage_seconds(
                geometry,
                formats,
                fence.layers_of(stage),
                profile,
                first=stage == 0,
                last=stage == fence.num_stages - 1,
                context_tokens=context_tokens,
                sequences=count,
                dtype_bytes=dtype_bytes,
                options=options,
            )
            for stage, profile in enumerate(chain)
        )

    rows = wave_sequences * (1 + options.spec_tokens)
    stages = seconds(wave_sequences)
    return PipelineTimes(
        waves=waves,
        wave_sequences=wave_sequences,
        stage_seconds=stages,
        link_seconds=(
            *(link_seconds(geometry, profile, rows, dtype_bytes) for profile in chain[:-1]),
            0.0,
        ),
        token_seconds=sum(seconds(1)),
        step_seconds=max(stages),
        tokens_per_s=sequences / max(waves * max(stages), sum(stages)),
    )


def _read_by(
    geometry: ModelGeometry, formats: Sequence[Pair], layers: range
) -> Iterator[tuple[LayerGeometry, LayerGeometry, Pair]]:
    """(layer, the layer whose cache it reads, that cache's formats) of ``layers``."""
    for index in layers:
        own = geometry.layers[index]
        source = own.source_layer if own.kind is LayerKind.SHARED else index
        yield own, geometry.layers[source], formats[source]


def _cache_operations(own: LayerGeometry, stored: LayerGeometry, context_tokens: int) -> int:
    """Operations of one row of a layer with its cache."""
    if own.kind.has_state:
        return (
            OPERATIONS_PER_STATE_ELEMENT * own.state_elements
            + 2 * own.conv_channels * own.conv_kernel
        )
    live = min(context_tokens, stored.window) if stored.window else context_tokens
    width = stored.key_row[1] + (stored.value_row[1] or stored.latent_size)
    heads = own.query_heads or stored.query_heads or stored.key_row[0]
    return 2 * heads * live * width
