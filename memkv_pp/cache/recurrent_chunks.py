"""The gated delta rule by chunks of rows: matrix products in place of a walk, for prefill.

Inside a chunk of C rows, with ``G_i`` the sum of the gates up to row i and ``S`` the state before
it, row i writes ``delta_i = beta_i (v_i - e^{G_i} S^T k_i - sum_{j<i} e^{G_i - G_j} (k_i . k_j)
delta_j)``. So the deltas solve a unit lower triangular system, whose right side is linear in S (the
WY form of "Gated Delta Networks", arXiv 2412.06464)::

    A_ij = beta_i (k_i . k_j) e^{G_i - G_j}   for j < i
    (I + A) U = beta v          (I + A) W = beta e^G k
    delta = U - W S
    out   = (e^G q) S + tril((q k^T) e^{G_i - G_j}) delta
    S'    = e^{G_C} S + (e^{G_C - G} k)^T delta

Shape legend: as in ``recurrent_ops``; C rows of a chunk.
"""

import torch
from torch import Tensor

from memkv_pp.cache.recurrent_ops import SpanTable, check_scan, no_outputs, state_of

CHUNK_ROWS = 64


def scan_delta_chunks(
    states_NHKV: Tensor,
    table: SpanTable,
    query_TGK: Tensor | None,
    key_TGK: Tensor,
    value_THV: Tensor,
    gate_TH: Tensor,
    beta_TH: Tensor,
) -> Tensor:
    """What ``recurrent_ops.scan_delta`` does, within the rounding of f32 sums in another order.

    Each span is cut into chunks of 64 rows counted from its first row, the last filled up with rows
    that change nothing. So every product has one shape: a span's result does not depend on its
    company, and two calls cut at a multiple of 64 give the bits of one. Gates are finite.
    """
    check_scan(states_NHKV, query_TGK, key_TGK, value_THV, gate_TH, beta_TH)
    table.check(len(key_TGK), len(states_NHKV))
    out_THV = no_outputs(value_THV, query_TGK)
    for first, num_rows, read, written in table.entries:
        state = state_of(states_NHKV, read)
        for begin in range(first, first + num_rows, CHUNK_ROWS):
            rows = slice(begin, min(begin + CHUNK_ROWS, first + num_rows))
            query = None if query_TGK is None else query_TGK[rows]
            part_HCV, state = _chunk(
                state, query, key_TGK[rows], value_THV[rows], gate_TH[rows], beta_TH[rows]
            )
            part_HCV = part_HCV[:, : rows.stop - begin]
            out_THV[rows] = part_HCV.transpose(0, 1).to(out_THV.dtype)
        if written >= 0:
            states_NHKV[written] = state
    return out_THV


def _chunk(
    state_HKV: Tensor,
    query_RGK: Tensor | None,
    key_RGK: Tensor,
    value_RHV: Tensor,
    gate_RH: Tensor,
    beta_RH: Tensor,
) -> tuple[Tensor, Tensor]:
    """Outputs [H, C, V] of up to C rows ([H, 0, V] without queries), and the state after them."""
    shared = value_RHV.shape[1] // key_RGK.shape[1]
    key_HCK, value_HCV = _filled(key_RGK, shared), _filled(value_RHV, 1)
    beta_HC1, gate_HC1 = _filled(beta_RH[..., None], 1), _filled(gate_RH[..., None], 1)
    total_HC1 = gate_HC1.cumsum(1)
    # Rows below the diagonal decay; above it the exponent would be positive and could overflow.
    decay_HCC = (total_HC1 - total_HC1.transpose(1, 2)).tril().exp().tril()
    grown_HC1 = total_HC1.exp()
    system_HCC = beta_HC1 * (key_HCK @ key_HCK.transpose(1, 2)) * decay_HCC
    right = torch.cat([beta_HC1 * value_HCV, beta_HC1 * grown_HC1 * key_HCK], 2)
    solved = torch.linalg.solve_triangular(system_HCC, right, upper=False, unitriangular=True)
    value_size = value_HCV.shape[2]
    delta_HCV = solved[..., :value_size] - solved[..., value_size:] @ state_HKV
    left_HC1 = (total_HC1[:, -1:] - total_HC1).exp()
    new = grown_HC1[:, -1:] * state_HKV + (left_HC1 * key_HCK).transpose(1, 2) @ delta_HCV
    if query_RGK is None:
        return value_HCV[:, :0], new
    query_HCK = _filled(query_RGK, shared)
    inside_HCC = (query_HCK @ key_HCK.transpose(1, 2)) * decay_HCC
    return (grown_HC1 * query_HCK) @ state_HKV + inside_HCC @ delta_HCV, new


def _filled(rows_RGX: Tensor, shared: int) -> Tensor:
    """f32 [H, C, X], zeros behind the rows: a key, a beta and a gate of 0 leave the state alone."""
    heads_GRX = rows_RGX.float().transpose(0, 1)
    padded = torch.nn.functional.pad(heads_GRX, (0, 0, 0, CHUNK_ROWS - len(rows_RGX)))
    return padded.repeat_interleave(shared, dim=0) if shared > 1 else padded
