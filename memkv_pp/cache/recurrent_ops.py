"""Recurrent layers over a packed batch, in torch: the reference of every kernel, and the fallback.

A sequence's states lie in *state slots* (``records.StateLayout``): uint8 [N, slot bytes] of an
arena. A kernel reads a span's state in one slot and writes it to another, so a window of
speculative rows leaves the state before it as it was: ``commit(n)`` runs the same kernel over the
first ``n`` rows of the window again, with the spans of ``SpanTable.first_rows``.

Shape legend: T rows of the batch, S spans, N slots, G key heads, H value heads, K and V sizes of a
key and of a value head, C channels of a convolution, W taps that its state keeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memkv_pp.errors import InternalError


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Whose rows run from which slot to which, for all layers of a step.

    ``spans``: int64 [S, 4] of (first row, rows, slot read, slot written). A negative slot read
    stands for a state of zeros; with a negative slot written the new state is dropped. A span of
    no rows copies its state, or zeroes it. A span may write the slot that it reads; no other span
    may read or write a slot that one writes.
    """

    spans: Tensor

    def to(self, device: torch.device) -> "SpanTable":
        """The same spans on ``device``."""
        return SpanTable(self.spans.to(device))

    @property
    def entries(self) -> list[list[int]]:
        """The spans as numbers."""
        return self.spans.tolist()

    def first_rows(self, counts: Sequence[int]) -> "SpanTable":
        """The same spans, cut to their first ``counts`` rows; InternalError for more than they have."""
        entries = self.entries
        for (_, rows, _, _), count in zip(entries, counts, strict=True):
            if not 0 <= count <= rows:
                raise InternalError(f"a span of {rows} rows has no first {count}")
        return span_table(
            [(first, n, a, b) for (first, _, a, b), n in zip(entries, counts, strict=True)]
        )

    def check(self, num_rows: int, num_slots: int) -> None:
        """InternalError unless rows are in [0, num_rows) and slots below num_slots."""
        for first, rows, read, written in self.entries:
            if not (0 <= first <= num_rows - rows and max(read, written) < num_slots):
                raise InternalError(
                    f"a span of rows [{first}, {first + rows}) from slot {read} to {written} does"
                    f" not lie in {num_rows} rows and {num_slots} slots"
                )


def span_table(entries: Sequence[tuple[int, int, int, int]]) -> SpanTable:
    """A table of (first row, rows, slot read, slot written).

    InternalError for spans whose rows overlap, or that meet in a slot that one of them writes.
    """
    end = 0
    for first, rows, _, _ in sorted(entry for entry in entries if entry[1]):
        if rows < 0 or first < end:
            raise InternalError(f"spans of rows overlap at row {first}: {list(entries)}")
        end = first + rows
    writer = {entry[3]: place for place, entry in enumerate(entries) if entry[3] >= 0}
    for place, (_, _, read, written) in enumerate(entries):
        if writer.get(read, place) != place or writer.get(written, place) != place:
            raise InternalError(f"spans meet in a slot that one writes: {list(entries)}")
    return SpanTable(torch.tensor(entries, dtype=torch.int64).reshape(len(entries), 4))


# ---- views of slots ----


def matrix_states(slots: Tensor, offset: int, heads: int, key_size: int, value_size: int) -> Tensor:
    """A layer's matrix states: an f32 view [N, H, K, V] of slots, ``offset`` bytes into each.

    This is the order of transformers. (memra's, [H][V][K], holds each head transposed.)
    """
    return _view(slots, offset, (heads, key_size, value_size))


def conv_states(slots: Tensor, offset: int, channels: int, taps: int) -> Tensor:
    """A layer's convolution states: an f32 view [N, C, W], the oldest row first."""
    return _view(slots, offset, (channels, taps))


def _view(slots: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
    elements = torch.Size(shape).numel()
    if offset < 0 or offset + 4 * elements > slots.shape[1] or offset % 4 or slots.stride(0) % 4:
        raise InternalError(
            f"{elements} f32 at byte {offset} do not lie in slots of {slots.shape[1]} bytes,"
            f" {slots.stride(0)} apart"
        )
    part = slots[:, offset : offset + 4 * elements].view(torch.float32)
    return part.view(len(slots), *shape)


# ---- the gated delta rule ----


def delta_rule(
    state_HKV: Tensor,
    query_TGK: Tensor | None,
    key_TGK: Tensor,
    value_THV: Tensor,
    gate_TH: Tensor,
    beta_TH: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over rows in order: outputs [T, H, V] and the state after them.

    A row decays the state by ``exp(gate)``, reads what it holds for the key, and writes ``beta``
    of what the value differs from that; the query reads the result::

        S = exp(g) S;   S = S + k (beta (v - k^T S))^T;   o = q^T S

    Everything is computed in the state's dtype. Queries come scaled and, as keys do, normalised.
    H is a multiple of G: key head ``h // (H / G)`` serves value head ``h``. Without queries the
    outputs are [0, H, V].
    """
    heads, dtype = state_HKV.shape[0], state_HKV.dtype
    shared = heads // key_TGK.shape[1]
    key_THK = key_TGK.to(dtype).repeat_interleave(shared, dim=1)
    query_THK = None if query_TGK is None else query_TGK.to(dtype).repeat_interleave(shared, dim=1)
    value_THV, beta_TH, decay_TH = value_THV.to(dtype), beta_TH.to(dtype), gate_TH.to(dtype).exp()
    state, out = state_HKV.clone(), no_outputs(value_THV, query_TGK)
    for row in range(len(key_THK)):
        key = key_THK[row, :, :, None]
        state *= decay_TH[row, :, None, None]
        held_HV = (key * state).sum(1)
        delta_HV = beta_TH[row, :, None] * (value_THV[row] - held_HV)
        state += key * delta_HV[:, None]
        if query_THK is not None:
            out[row] = (query_THK[row, :, :, None] * state).sum(1)
    return out, state


def scan_delta(
    states_NHKV: Tensor,
    table: SpanTable,
    query_TGK: Tensor | None,
    key_TGK: Tensor,
    value_THV: Tensor,
    gate_TH: Tensor,
    beta_TH: Tensor,
) -> Tensor:
    """``delta_rule`` of each span, from slot to slot: [T, H, V] in the values' dtype.

    Rows of no span come out as zeros. Rows are f32, bf16 or f16, gates and betas f32. InternalError
    for shapes that do not fit and for rows or slots that are not there.
    """
    check_scan(states_NHKV, query_TGK, key_TGK, value_THV, gate_TH, beta_TH)
    table.check(len(key_TGK), len(states_NHKV))
    out_THV = no_outputs(value_THV, query_TGK)
    for first, num_rows, read, written in table.entries:
        rows = slice(first, first + num_rows)
        query = None if query_TGK is None else query_TGK[rows]
        part, state = delta_rule(
            state_of(states_NHKV, read), query, key_TGK[rows], value_THV[rows],
            gate_TH[rows], beta_TH[rows],
        )  # fmt: skip
        out_THV[rows] = part.to(out_THV.dtype)
        if written >= 0:
            states_NHKV[written] = state
    return out_THV


def no_outputs(value_THV: Tensor, query_TGK: Tensor | None) -> Tensor:
    """Zeros for the outputs of a scan: [T, H, V], or [0, H, V] without queries."""
    num_rows = 0 if query_TGK is None else len(value_THV)
    return value_THV.new_zeros((num_rows, *value_THV.shape[1:]))


def state_of(states: Tensor, slot: int) -> Tensor:
    """The state of ``slot``; zeros for a negative one."""
    return states[slot] if slot >= 0 else states.new_zeros(states.shape[1:])


def check_scan(
    states_NHKV: Tensor,
    query_TGK: Tensor | None,
    key_TGK: Tensor,
    value_THV: Tensor,
    gate_TH: Tensor,
    beta_TH: Tensor,
) -> None:
    """InternalError unless the tensors are those of one ``scan_delta``."""
    _, heads, key_size, value_size = states_NHKV.shape
    rows, key_heads = key_TGK.shape[:2]
    fits = (
        dense_f32(states_NHKV)
        and key_heads > 0
        and heads % key_heads == 0
        and key_TGK.shape[2] == key_size
        and value_THV.shape == (rows, heads, value_size)
        and gate_TH.shape == beta_TH.shape == (rows, heads)
        and gate_TH.dtype == beta_TH.dtype == torch.float32
        and (query_TGK is None or query_TGK.shape == key_TGK.shape)
    )
    if not fits:
        query = None if query_TGK is None else list(query_TGK.shape)
        raise InternalError(
            f"scan_delta: queries {query}, keys {list(key_TGK.shape)}, values"
            f" {list(value_THV.shape)}, gates {list(gate_TH.shape)} {gate_TH.dtype} and betas"
            f" {list(beta_TH.shape)} {beta_TH.dtype} do not fit states"
            f" {list(states_NHKV.shape)} {states_NHKV.dtype}"
        )


def dense_f32(states: Tensor) -> bool:
    """Whether each slot's state is dense f32, wherever the slots lie."""
    return states.dtype is torch.float32 and (not states.numel() or states[0].is_contiguous())


# ---- the short convolution ----


def short_conv(
    states_NCW: Tensor,
    table: SpanTable,
    values_TC: Tensor,
    weight_CX: Tensor,
    bias_C: Tensor | None = None,
    *,
    silu: bool = False,
) -> Tensor:
    """Causal depthwise convolution of each span's rows, behind the ``W`` rows of its state.

    ``weight_CX`` has ``W + 1`` taps, the last for the row itself (``nn.Conv1d``'s, its middle
    dimension dropped). Returns [T, C] in the rows' dtype, zeros for rows of no span, and rolls the
    states as ``roll_conv`` does. The sum starts from the bias (or 0) and takes products in order,
    the oldest first, all in f32; then SiLU, if asked for.
    """
    check_conv(states_NCW, values_TC, weight_CX, bias_C)
    table.check(len(values_TC), len(states_NCW))
    weight = weight_CX.float()
    out_TC = torch.zeros_like(values_TC, memory_format=torch.contiguous_format)
    for first, num_rows, read, _ in table.entries:
        rows = slice(first, first + num_rows)
        seen = torch.cat([state_of(states_NCW, read).T, values_TC[rows].float()])
        total = seen.new_zeros(num_rows, seen.shape[1])
        if bias_C is not None:
            total += bias_C.float()
        for tap in range(weight.shape[1]):
            total += weight[:, tap] * seen[tap : tap + num_rows]
        out_TC[rows] = (torch.nn.functional.silu(total) if silu else total).to(out_TC.dtype)
    roll_conv(states_NCW, table, values_TC)
    return out_TC


def roll_conv(states_NCW: Tensor, table: SpanTable, values_TC: Tensor) -> None:
    """Write each span's new state: the last ``W`` rows of its old state and its rows after it."""
    check_conv(states_NCW, values_TC, None, None)
    table.check(len(values_TC), len(states_NCW))
    taps = states_NCW.shape[2]
    for first, num_rows, read, written in table.entries:
        if written >= 0:
            new = values_TC[first : first + num_rows].float()
            seen = torch.cat([state_of(states_NCW, read).T, new])
            states_NCW[written] = seen[len(seen) - taps :].T


def check_conv(
    states_NCW: Tensor, values_TC: Tensor, weight_CX: Tensor | None, bias_C: Tensor | None
) -> None:
    """InternalError unless the tensors are those of one convolution."""
    _, channels, taps = states_NCW.shape
    fits = (
        dense_f32(states_NCW)
        and values_TC.shape[1:] == (channels,)
        and (weight_CX is None or weight_CX.shape == (channels, taps + 1))
        and (bias_C is None or bias_C.shape == (channels,))
    )
    if not fits:
        weight = None if weight_CX is None else list(weight_CX.shape)
        raise InternalError(
            f"short_conv: rows {list(values_TC.shape)} and weights {weight} do not fit states"
            f" {list(states_NCW.shape)} {states_NCW.dtype}"
        )


# ---- whole slots ----


def copy_slots(slots: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy slot ``a`` to slot ``b`` for each (a, b), in order; a negative ``a`` zeroes ``b``.

    ``slots`` is uint8 [N, slot bytes] or a part of it. Each pair is one move of contiguous memory,
    which torch does at its full speed: there is no kernel of ours on the CPU.
    """
    for source, target in pairs:
        if not (source < len(slots) and 0 <= target < len(slots)):
            raise InternalError(f"slot {source} cannot be copied to {target} of {len(slots)} slots")
        if source >= 0:
            slots[target].copy_(slots[source])
        else:
            slots[target].zero_()
