"""Suite ``codec``: rows packed into records and unpacked from them, in GB/s of f32.

Peers, on one thread as ours: ``memcpy`` copies the same f32 rows; ``torch`` is the codec that serves
where there is no compiler; ``ggml`` (its five formats, where ``llama_cpp`` is installed) is the
fastest code of its libraries on the same rows, ``ggml-chunk`` its ``ggml_quantize_chunk`` where
that is not the fastest. Rows of rotated formats are rotated within the call, and come back as stored.
"""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from memkv_pp.bench import ggml
from memkv_pp.bench.rows import Row, higher_is_better, interleaved_medians
from memkv_pp.cache import host_kernels
from memkv_pp.cache.codec import decode, encode
from memkv_pp.cache.host_codec import BASE_FORMATS, HostCodec
from memkv_pp.cache.rotation import rotate
from memkv_pp.clock import SystemClock
from memkv_pp.errors import ConfigError, InternalError
from memkv_pp.formats import Format, parse_format
from memkv_pp.packing import to_ggml_block

HEADS, HEAD_SIZE, RECORD_ROWS = 8, 128, 16
NUM_RECORDS = 1024

_CHECKED_RECORDS = 2
# ggml's vector code may choose a neighbouring code, no more often than this.
_OFF_BY_ONE = 1e-4
_CLOCK = SystemClock()


def run(*, rounds: int, num_records: int = NUM_RECORDS) -> Iterator[Row]:
    """The suite's rows, one by one; InternalError if two sides do not agree.

    ``num_records`` of 64 KiB of f32 are packed at a time. ConfigError where the host kernels cannot be built.
    """
    kernels = host_kernels.load()
    if kernels is None:
        status = host_kernels.status()
        raise ConfigError(f"suite codec: no host kernels: {status.found}", status.hint)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in BASE_FORMATS:
            yield from _Contest(parse_format(name), kernels.codec, num_records).rows(rounds)
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Peer:
    name: str
    quantise: Callable[[], object] | None = None
    dequantise: Callable[[], object] | None = None


class _Contest:
    """One format: the same rows in our records and in the peers' memory."""

    def __init__(self, fmt: Format, codec: HostCodec, num_records: int) -> None:
        self._fmt, self._codec = fmt, codec
        tokens = num_records * RECORD_ROWS
        generator = torch.Generator().manual_seed(1)
        self._values_THD = torch.randn(tokens, HEADS, HEAD_SIZE, generator=generator)
        self._records_N = torch.arange(num_records)
        self._records_T = self._records_N.repeat_interleave(RECORD_ROWS)
        self._rows_T = torch.arange(RECORD_ROWS).repeat(num_records)
        shape = (num_records, HEADS, RECORD_ROWS)
        self._codes = torch.zeros(*shape, fmt.code_row_bytes(HEAD_SIZE), dtype=torch.uint8)
        self._scales = torch.zeros(*shape, fmt.scale_row_bytes(HEAD_SIZE), dtype=torch.uint8)
        self._out = torch.zeros(HEADS, tokens, HEAD_SIZE)

    def rows(self, rounds: int) -> Iterator[Row]:
        """Both directions beside every peer."""
        self._append()
        self._gather()
        self._check_torch()
        peers = [self._memcpy()]
        if self._fmt.name != "f32":  # of which torch makes a view
            peers.append(self._torch())
        library = ggml.find() if self._fmt.name in ggml.TYPES else None
        if library is not None:
            peers += self._ggml(library)
        for what, ours in (("quantise", self._append), ("dequantise", self._gather)):
            calls = {peer.name: call for peer in peers if (call := getattr(peer, what))}
            contenders = [self._timed(call) for call in (ours, *calls.values())]
            figures = interleaved_medians(contenders, rounds)
            for peer, figure in zip(calls, figures[1:], strict=True):
                name = f"codec/{self._fmt.name}/{what}"
                yield higher_is_better(name, figures[0], "GB/s", peer, figure, 1)

    def _append(self) -> None:
        self._codec.append(
            self._fmt, self._codes, self._scales, self._records_T, self._rows_T, self._values_THD
        )

    def _gather(self) -> None:
        self._codec.gather(
            *(self._fmt, HEAD_SIZE, self._codes, self._scales, self._records_N, torch.float32),
            out=self._out,
        )

    def _timed(self, call: Callable[[], object]) -> Callable[[], float]:
        def rate() -> float:
            started = _CLOCK.now()
            call()
            return self._values_THD.numel() * 4 / 1e9 / (_CLOCK.now() - started)

        return rate

    def _encode(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = rotate(self._values_THD) if self._fmt.rotated else self._values_THD
        return encode(self._fmt, rows)

    def _check_torch(self) -> None:
        codes, scales = self._encode()
        where = self._records_T, slice(None), self._rows_T
        same = torch.equal(self._codes[where], codes) and torch.equal(self._scales[where], scales)
        values = decode(self._fmt, codes, scales, HEAD_SIZE, torch.float32)
        if not (same and torch.equal(self._out, values.transpose(0, 1))):
            raise InternalError(f"{self._fmt.name}: the kernels and the torch codec differ")

    def _memcpy(self) -> _Peer:
        there = torch.zeros_like(self._values_THD)

        def copy() -> None:
            ctypes.memmove(
                there.data_ptr(), self._values_THD.data_ptr(), self._values_THD.numel() * 4
            )

        return _Peer(name="memcpy", quantise=copy, dequantise=copy)

    def _torch(self) -> _Peer:
        codes, scales = self._encode()
        return _Peer(
            name="torch",
            quantise=self._encode,
            dequantise=lambda: decode(self._fmt, codes, scales, HEAD_SIZE, torch.float32),
        )

    def _ggml(self, library: ggml.Ggml) -> list[_Peer]:
        fmt, values = self._fmt, self._values_THD
        blocks = torch.zeros(values.numel() // fmt.group, fmt.group_bytes, dtype=torch.uint8)
        back = torch.zeros_like(values)

        def chunk() -> None:
            library.quantise_chunk(fmt, values, blocks)

        def vectors() -> None:
            library.quantise_vectors(fmt, values, blocks)

        def unpack() -> None:
            library.dequantise(fmt, blocks, back)

        chunk()
        unpack()
        self._check_ggml(blocks, back)
        if fmt.name not in ggml.VECTOR_FORMATS:
            return [_Peer(name="ggml", quantise=chunk, dequantise=unpack)]
        exact = blocks.clone()
        vectors()
        if (blocks != exact).count_nonzero() > _OFF_BY_ONE * blocks.numel():
            raise InternalError(f"{fmt.name}: the two codecs of ggml differ in many bytes")
        return [
            _Peer(name="ggml", quantise=vectors, dequantise=unpack),
            _Peer(name="ggml-chunk", quantise=chunk),
        ]

    def _check_ggml(self, blocks: torch.Tensor, back: torch.Tensor) -> None:
        if not torch.equal(back.transpose(0, 1), self._out):
            raise InternalError(f"{self._fmt.name}: the kernels and ggml unpack different numbers")
        tokens = _CHECKED_RECORDS * RECORD_ROWS
        groups = HEAD_SIZE // 32
        codes, scales = (
            part[:_CHECKED_RECORDS].transpose(1, 2).reshape(tokens * HEADS * groups, -1)
            for part in (self._codes, self._scales)
        )
        ours = b"".join(
            to_ggml_block(self._fmt, bytes(c), bytes(s))
            for c, s in zip(codes.tolist(), scales.tolist(), strict=True)
        )
        if bytes(blocks.flatten()[: len(ours)].tolist()) != ours:
            raise InternalError(f"{self._fmt.name}: the kernels and ggml pack different bytes")
