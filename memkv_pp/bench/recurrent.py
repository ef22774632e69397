"""Suite ``recurrent``: the host scan and convolution beside torch.

Peers: ``transformers`` is the torch code of its Qwen3-Next layer, which serves where no GPU kernel
does: the recurrent rule for the rows of a decode step, the chunked rule for prefill, and torch's
convolution over the state and the rows. ``chunks`` is our own chunked form. ``scan`` is the scan of
the same rows, beside which a commit must stay cheap.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from memkv_pp.bench.rows import Row, interleaved_medians, lower_is_better
from memkv_pp.cache import host_kernels, host_recurrent
from memkv_pp.cache.host_recurrent import HostRecurrent
from memkv_pp.cache.recurrent_chunks import scan_delta_chunks
from memkv_pp.cache.recurrent_ops import span_table
from memkv_pp.clock import SystemClock
from memkv_pp.errors import ConfigError, InternalError
from memkv_pp.testing.recurrent_rows import delta_rows

# The recurrent layers of Qwen3-Next: 16 key and 32 value heads of 128, 8192 channels.
KEY_HEADS, HEADS, HEAD_SIZE, CHANNELS, TAPS = 16, 32, 128, 8192, 3
DECODE_ROWS, PREFILL_ROWS = (1, 4), 512

_THREADS = 2
# A call shorter than this is repeated within one figure.
_SHORTEST_S = 0.02
# Both sides sum in f32, in orders of their own.
_AGREEMENT = 1e-4

Call = Callable[[], Tensor]


def run(*, rounds: int, prefill_rows: int = PREFILL_ROWS) -> Iterator[Row]:
    """The suite's rows, one by one; ConfigError without a compiler, InternalError if sides differ."""
    if host_kernels.load() is None:
        status = host_kernels.status()
        raise ConfigError(f"--suite recurrent: no host kernels: {status.found}", status.hint)
    kernel = host_recurrent.loaded()
    assert kernel is not None
    before = torch.get_num_threads()
    torch.set_num_threads(_THREADS)
    try:
        for num_rows in DECODE_ROWS:
            yield from _scan(kernel, num_rows, rounds)
        yield from _scan(kernel, prefill_rows, rounds)
        for num_rows in (*DECODE_ROWS, prefill_rows):
            yield from _convolution(kernel, num_rows, rounds)
    finally:
        torch.set_num_threads(before)


def _scan(kernel: HostRecurrent, num_rows: int, rounds: int) -> Iterator[Row]:
    """A span of rows over all heads; a commit of all its rows; for prefill, the chunked forms."""
    rows = delta_rows(num_rows, KEY_HEADS, HEADS, HEAD_SIZE, HEAD_SIZE)
    query, key, value, gate, beta = rows.arguments()
    assert query is not None
    states = torch.zeros(3, HEADS, HEAD_SIZE, HEAD_SIZE)
    states[0] = torch.randn(states[0].shape, generator=torch.Generator().manual_seed(1))
    ours, other = span_table([(0, num_rows, 0, 1)]), span_table([(0, num_rows, 0, 2)])
    prefill = num_rows not in DECODE_ROWS
    rule = (
        qwen3_next.torch_chunk_gated_delta_rule
        if prefill
        else qwen3_next.torch_recurrent_gated_delta_rule
    )
    # The peer scales the queries itself.
    peer_rows = [x[None] for x in (query * HEAD_SIZE**0.5, key, value, gate, beta)]
    calls: dict[str, Call] = {
        "scan": lambda: kernel.scan_delta(states, ours, *rows.arguments(), threads=_THREADS),
        "transformers": lambda: rule(*peer_rows, initial_state=states[:1], output_final_state=True)[
            0
        ][0],
    }
    if prefill:
        calls["chunks"] = lambda: scan_delta_chunks(states, other, *rows.arguments())
    name = f"recurrent/{'prefill' if prefill else 'decode'}-{num_rows}"
    _check_agreement(name, calls)
    if not prefill:
        again = rows.without_queries().arguments()
        calls["commit"] = lambda: kernel.scan_delta(states, ours, *again, threads=_THREADS)
    times = _times(calls, rounds)
    yield _beside(name, times, "scan", "transformers")
    if prefill:
        yield _beside(f"{name}/over-chunks", times, "scan", "chunks")
    else:
        yield _beside(f"{name}/commit", times, "commit", "scan")


def _convolution(kernel: HostRecurrent, num_rows: int, rounds: int) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(num_rows, CHANNELS, generator=generator)
    weight = torch.randn(CHANNELS, TAPS + 1, generator=generator)
    states = torch.randn(2, CHANNELS, TAPS, generator=generator)
    table = span_table([(0, num_rows, 0, 1)])

    def peer() -> Tensor:
        seen = torch.cat([states[0], values.T], 1)
        out = torch.nn.functional.conv1d(seen[None], weight[:, None], groups=CHANNELS)[0]
        states[1] = seen[:, -TAPS:]
        return torch.nn.functional.silu(out).T

    calls: dict[str, Call] = {
        "ours": lambda: kernel.short_conv(
            states, table, values, weight, silu=True, threads=_THREADS
        ),
        "torch": peer,
    }
    name = f"recurrent/short-conv-{num_rows}"
    _check_agreement(name, calls)
    yield _beside(name, _times(calls, rounds), "ours", "torch")


def _check_agreement(name: str, calls: dict[str, Call]) -> None:
    first, *others = (call() for call in calls.values())
    for peer, out in zip(list(calls)[1:], others, strict=True):
        error = (first - out).abs().max().item()
        if not error <= _AGREEMENT:
            raise InternalError(f"{name} is off by {error} from {peer}")


def _times(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median seconds of each call, taken in turns."""
    clock = SystemClock()

    def seconds(call: Call) -> float:
        started, count = clock.now(), 0
        while True:
            call()
            count += 1
            taken = clock.now() - started
            if taken >= _SHORTEST_S:
                return taken / count

    contenders = [lambda call=call: seconds(call) for call in calls.values()]
    return dict(zip(calls, interleaved_medians(contenders, rounds), strict=True))


def _beside(name: str, times: dict[str, float], ours: str, peer: str) -> Row:
    return lower_is_better(name, times[ours] * 1e3, "ms", peer, times[peer] * 1e3, _THREADS)
