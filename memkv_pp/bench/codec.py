"""Suite ``codec``: rows packed into records and unpacked from them, in GB/s of f32.

Peers, on one thread as ours: ``memcpy`` copies the same f32 rows; ``torch`` is the codec that serves
where there is no compiler; ``ggml`` (its five formats, where ``llama_cpp`` is installed) is
``ggml_quantize_chunk`` and ``dequantize_row_…`` of its library on the same rows.
"""

import ctypes
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from memkv_pp.bench.rows import Row, higher_is_better, interleaved_medians
from memkv_pp.cache import host_kernels
from memkv_pp.cache.codec import decode, encode
from memkv_pp.cache.host_codec import FORMAT_IDS, HostCodec
from memkv_pp.clock import SystemClock
from memkv_pp.errors import ConfigError, InternalError
from memkv_pp.formats import Family, Format, parse_format
from memkv_pp.packing import to_ggml_block

HEADS, HEAD_SIZE, RECORD_ROWS = 8, 128, 16
NUM_RECORDS = 1024

_CHECKED_RECORDS = 2
# ggml's numbers of its types.
_GGML_TYPES = {"q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8}
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
        for name in FORMAT_IDS:
            yield from _Contest(parse_format(name), kernels.codec, num_records).rows(rounds)
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Peer:
    name: str
    quantise: Callable[[], object]
    dequantise: Callable[[], object]


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
        if self._fmt.family is Family.GGML and importlib.util.find_spec("llama_cpp"):
            peers.append(self._ggml())
        for what, ours in (("quantise", self._append), ("dequantise", self._gather)):
            theirs = [getattr(peer, what) for peer in peers]
            figures = interleaved_medians([self._timed(call) for call in (ours, *theirs)], rounds)
            for peer, figure in zip(peers, figures[1:], strict=True):
                name = f"codec/{self._fmt.name}/{what}"
                yield higher_is_better(name, figures[0], "GB/s", peer.name, figure, 1)

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

    def _check_torch(self) -> None:
        codes, scales = encode(self._fmt, self._values_THD)
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
        codes, scales = encode(self._fmt, self._values_THD)
        return _Peer(
            name="torch",
            quantise=lambda: encode(self._fmt, self._values_THD),
            dequantise=lambda: decode(self._fmt, codes, scales, HEAD_SIZE, torch.float32),
        )

    def _ggml(self) -> _Peer:
        spec = importlib.util.find_spec("llama_cpp")
        assert spec is not None
        assert spec.origin is not None
        library = ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libggml-base.so"))
        quantize = library.ggml_quantize_chunk
        i64, pointer = ctypes.c_int64, ctypes.c_void_p
        quantize.argtypes = (ctypes.c_int, pointer, pointer, i64, i64, i64, pointer)
        quantize.restype = ctypes.c_size_t
        dequantize = getattr(library, f"dequantize_row_{self._fmt.name}")
        dequantize.argtypes, dequantize.restype = (pointer, pointer, i64), None
        values = self._values_THD
        blocks = torch.zeros(values.numel() // 32 * self._fmt.group_bytes, dtype=torch.uint8)
        back = torch.zeros_like(values)
        number = _GGML_TYPES[self._fmt.name]
        num_rows = values.shape[0] * HEADS

        def pack() -> None:
            quantize(number, values.data_ptr(), blocks.data_ptr(), 0, num_rows, HEAD_SIZE, None)

        def unpack() -> None:
            dequantize(blocks.data_ptr(), back.data_ptr(), values.numel())

        pack()
        unpack()
        self._check_ggml(blocks, back)
        return _Peer(name="ggml", quantise=pack, dequantise=unpack)

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
        if bytes(blocks[: len(ours)].tolist()) != ours:
            raise InternalError(f"{self._fmt.name}: the kernels and ggml pack different bytes")
