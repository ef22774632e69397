"""Suite ``attend``: attention over packed rows beside torch over unpacked copies.

Peers: ``sdpa-bf16`` and ``sdpa-f32`` are ``scaled_dot_product_attention`` over contiguous copies of
the same rows, query heads of one KV head grouped as rows, its fastest form here; ``memcpy`` is the
bandwidth of a copy that reads and writes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from memkv_pp.bench.rows import Row, higher_is_better, interleaved_medians, lower_is_better
from memkv_pp.cache import host_attention, host_kernels
from memkv_pp.cache.attention import SegmentTable, segment_table
from memkv_pp.cache.codec import encode
from memkv_pp.cache.host_attention import HostAttention
from memkv_pp.cache.ops import LayerView, SideView
from memkv_pp.clock import SystemClock
from memkv_pp.errors import ConfigError, InternalError
from memkv_pp.formats import Format, parse_pair

PAIRS = ("bf16:bf16", "q8_0:q5_1", "q4_0:q4_0")
CONTEXTS = {"4k": 4096, "32k": 32768, "128k": 131072}
KV_HEADS, GROUP, HEAD_SIZE, BLOCK = 8, 4, 128, 16

_THREADS = 2
_PREFILL_ROWS = 256
_COPY_BYTES = 128 * 2**20
# A call shorter than this is repeated within one figure.
_SHORTEST_S = 0.02
# Errors of a packed row against its f32 original, weighted over thousands of keys.
_AGREEMENT = {"bf16:bf16": 2e-2, "q8_0:q5_1": 2e-2, "q4_0:q4_0": 1e-1}


def run(*, rounds: int) -> Iterator[Row]:
    """The suite's rows, one by one; ConfigError without a compiler, InternalError if sides differ."""
    if host_kernels.load() is None:
        status = host_kernels.status()
        raise ConfigError(f"--suite attend: no host kernels: {status.found}", status.hint)
    kernel = host_attention.loaded()
    assert kernel is not None
    torch.set_num_threads(_THREADS)
    bench = _Bench(kernel, rounds)
    copy = bench.memcpy()
    for name, context in CONTEXTS.items():
        yield from bench.decode(f"attend/{name}", context, copy)
    yield from bench.prefill(f"attend/prefill-{_PREFILL_ROWS}-of-4k", CONTEXTS["4k"])


@dataclass(frozen=True, slots=True)
class _Rows:
    """K and V of one sequence, f32 [L, H, D], and the last T rows' queries [T, H * G, D]."""

    key: torch.Tensor
    value: torch.Tensor
    query: torch.Tensor

    def peer(self, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """The peer's call over its own copies: [T, H * G, D] in ``dtype``."""
        num_rows, length = len(self.query), len(self.key)
        key, value = (t.transpose(0, 1).contiguous().to(dtype) for t in (self.key, self.value))
        query = self.query.view(num_rows, KV_HEADS, GROUP, HEAD_SIZE).permute(1, 2, 0, 3)
        query = query.reshape(KV_HEADS, GROUP * num_rows, HEAD_SIZE).to(dtype)
        mask = None
        if num_rows > 1:
            positions = torch.arange(length - num_rows, length)
            mask = (torch.arange(length)[None] <= positions[:, None]).repeat(GROUP, 1)

        def call() -> torch.Tensor:
            out = torch.nn.functional.scaled_dot_product_attention(
                query[None], key[None], value[None], attn_mask=mask
            )[0]
            return out.view(KV_HEADS * GROUP, num_rows, HEAD_SIZE).transpose(0, 1)

        return call

    def packed(self, pair: str) -> LayerView:
        """The rows in records of their own."""
        formats = parse_pair(pair)
        return LayerView(_side(formats.k, self.key), _side(formats.v, self.value))


class _Bench:
    def __init__(self, kernel: HostAttention, rounds: int) -> None:
        self._kernel = kernel
        self._rounds = rounds
        self._clock = SystemClock()

    def memcpy(self) -> float:
        """GB/s of a copy, both directions counted."""
        source, target = (torch.ones(_COPY_BYTES, dtype=torch.uint8) for _ in range(2))
        (seconds,) = interleaved_medians(
            [lambda: self._seconds(lambda: target.copy_(source))], self._rounds
        )
        return 2 * _COPY_BYTES / seconds / 1e9

    def decode(self, name: str, context: int, copy_gb_s: float) -> Iterator[Row]:
        """One row's attention: milliseconds beside both peers, and GB/s of packed bytes."""
        rows = _rows(1, context)
        packed = {pair: rows.packed(pair) for pair in PAIRS}
        times = self._times(rows, packed, name)
        for pair, view in packed.items():
            ours = times[pair]
            yield _beside(f"{name}/{pair}", ours, "sdpa-bf16", times["sdpa-bf16"])
            yield _beside(f"{name}/{pair}/over-f32", ours, "sdpa-f32", times["sdpa-f32"])
            yield higher_is_better(
                f"{name}/{pair}/bandwidth",
                _packed_bytes(view) / ours / 1e9,
                "GB/s",
                "memcpy",
                copy_gb_s,
                _THREADS,
            )

    def prefill(self, name: str, context: int) -> Iterator[Row]:
        """A chunk of rows at the end of a context."""
        rows = _rows(_PREFILL_ROWS, context)
        packed = {pair: rows.packed(pair) for pair in PAIRS}
        times = self._times(rows, packed, name)
        for pair in PAIRS:
            for peer in ("sdpa-bf16", "sdpa-f32"):
                suffix = "" if peer == "sdpa-bf16" else "/over-f32"
                yield _beside(f"{name}/{pair}{suffix}", times[pair], peer, times[peer])

    def _times(self, rows: _Rows, packed: dict[str, LayerView], name: str) -> dict[str, float]:
        """Median seconds of every pair and peer, taken in turns, once they agree."""
        table = segment_table(
            [(0, len(rows.query), len(rows.key), torch.arange(len(rows.key) // BLOCK))], BLOCK
        )
        calls = {pair: self._call(view, rows.query, table) for pair, view in packed.items()}
        expected = (exact := rows.peer(torch.float32))()
        for pair, call in calls.items():
            error = (call() - expected).abs().max().item()
            if not error <= _AGREEMENT[pair]:
                raise InternalError(f"{name}/{pair} is off by {error} from sdpa over f32")
        calls |= {"sdpa-bf16": rows.peer(torch.bfloat16), "sdpa-f32": exact}
        contenders = [lambda call=call: self._seconds(call) for call in calls.values()]
        return dict(zip(calls, interleaved_medians(contenders, self._rounds), strict=True))

    def _call(
        self, view: LayerView, query: torch.Tensor, table: SegmentTable
    ) -> Callable[[], torch.Tensor]:
        return lambda: self._kernel.attend(
            view.k, view.v, query, table, HEAD_SIZE**-0.5, threads=_THREADS
        )

    def _seconds(self, call: Callable[[], object]) -> float:
        """Seconds of a call, the mean over as many as take ``_SHORTEST_S``."""
        started = self._clock.now()
        count = 0
        while True:
            call()
            count += 1
            taken = self._clock.now() - started
            if taken >= _SHORTEST_S:
                return taken / count


def _rows(num_rows: int, length: int) -> _Rows:
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(length, KV_HEADS, HEAD_SIZE, generator=generator) for _ in range(2))
    query = torch.randn(num_rows, KV_HEADS * GROUP, HEAD_SIZE, generator=generator)
    return _Rows(key, value, query)


def _side(fmt: Format, rows_LHD: torch.Tensor) -> SideView:
    records = rows_LHD.view(-1, BLOCK, KV_HEADS, HEAD_SIZE).transpose(1, 2)
    codes, scales = (part.contiguous() for part in encode(fmt, records.contiguous()))
    return SideView(fmt, HEAD_SIZE, codes, scales, codes.new_empty(len(codes), KV_HEADS, 1, 0))


def _packed_bytes(view: LayerView) -> int:
    return sum(part.numel() for s in (view.k, view.v) for part in (s.codes, s.scales))


def _beside(name: str, ours_s: float, peer: str, peer_s: float) -> Row:
    return lower_is_better(name, ours_s * 1e3, "ms", peer, peer_s * 1e3, _THREADS)
