"""Hostile GGUF headers: every one ends in a typed error or in a geometry that can be sized.

Run as a script, this file is the child that reads mutated headers under limits.
"""

import json
import random
import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from memkv_pp.errors import GeometryError, MemkvError
from memkv_pp.formats import parse_pair
from memkv_pp.geometry import LayerKind
from memkv_pp.model.from_gguf import geometry_from_header
from memkv_pp.model.gguf_header import read_header
from memkv_pp.sizing import CacheOptions, layer_bytes_per_token, size_layers
from memkv_pp.testing.gguf_files import Tensor, Typed, gguf_bytes

CASE_SECONDS = 2
CASE_BYTES = 500 * 1000**2
F32 = parse_pair("f32")

NAME = {"general.architecture": "llama"}
ONE = Tensor("blk.0.a", (32, 2))


def raw_string(text):
    return struct.pack("<Q", len(text)) + text


def raw_file(keys=(), tensors=(), *, magic=b"GGUF", version=3, num_keys=None, num_tensors=None):
    """A header whose counts may lie: ``keys`` and ``tensors`` are bytes."""
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    return head + b"".join(keys) + b"".join(tensors)


def raw_key(key, type_id, value):
    return raw_string(key) + struct.pack("<I", type_id) + value


def raw_tensor(name=b"t", dims=(32,), type_id=0, offset=0, num_dims=None):
    count = len(dims) if num_dims is None else num_dims
    return (
        raw_string(name)
        + struct.pack("<I", count)
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", type_id, offset)
    )


def raw_array(item_type, count, items=b""):
    return struct.pack("<IQ", item_type, count) + items


PAD = raw_key(b"pad", 8, raw_string(b"x" * 400))

HOSTILE = {
    "an empty file": (b"", "magic: the file is empty"),
    "a wrong magic": (raw_file(magic=b"GGML"), r"byte 0: magic: b'GGML' is not b'GGUF'"),
    "half a magic": (b"GG", "byte 0: magic"),
    "a file that ends in its counts": (raw_file()[:12], "tensor count: needs 8 bytes"),
    "version 1": (raw_file(version=1), "byte 4: version: GGUF version 1 is not read"),
    "version 4": (raw_file(version=4), "version: GGUF version 4 is not read"),
    "big-endian": (raw_file(version=3 << 24), "big-endian GGUF .version 3. is not read"),
    "2^60 keys": (raw_file(num_keys=2**60), f"key count {2**60}: needs"),
    "2^60 tensors": (raw_file(num_tensors=2**60), f"tensor count {2**60}: needs"),
    "2^64 - 1 keys": (raw_file(num_keys=2**64 - 1), "key count"),
    "more keys than bytes": (raw_file([PAD], num_keys=2), r"key length: needs 8 bytes, 0 remain"),
    "an over-long key": (raw_file([struct.pack("<Q", 2**17) + bytes(2**17)]), "131072 is over"),
    "a key past the end": (raw_file([struct.pack("<Q", 999) + bytes(60)]), "key: needs 999 bytes"),
    "an empty key": (raw_file([raw_key(b"", 0, b"\1"), PAD]), "byte 24: key '': is empty"),
    "a key of bad UTF-8": (raw_file([raw_key(b"a\xff", 0, b"\1")]), "byte 33: key: is no UTF-8"),
    "a value of bad UTF-8": (
        raw_file([raw_key(b"a", 8, raw_string(b"\xc3"))]),
        "value of 'a': is no UTF-8",
    ),
    "a string past the end": (
        raw_file([raw_key(b"a", 8, struct.pack("<Q", 2**60))]),
        "value of 'a' length: 1152921504606846976 is over",
    ),
    "a string a byte too long": (
        raw_file([raw_key(b"a", 8, struct.pack("<Q", 4) + b"abc")]),
        "value of 'a': needs 4 bytes, 3 remain",
    ),
    "an unknown value type": (raw_file([raw_key(b"a", 13, b"\1")]), "unknown value type 13"),
    "a bool of 2": (raw_file([raw_key(b"a", 7, b"\2")]), "value of 'a': 2 is no bool"),
    "a duplicate key": (
        raw_file([raw_key(b"a", 0, b"\1"), raw_key(b"a", 0, b"\1")]),
        "byte 38: key 'a': is a duplicate",
    ),
    "a duplicate of a skipped key": (
        raw_file([raw_key(b"tokenizer.a", 9, raw_array(0, 1, b"\1"))] * 2),
        "'tokenizer.a': is a duplicate",
    ),
    "an array of 2^60 items": (
        raw_file([raw_key(b"a", 9, raw_array(4, 2**60))]),
        "value of 'a', 1152921504606846976 items: needs",
    ),
    "a skipped array of 2^62 strings": (
        raw_file([raw_key(b"tokenizer.a", 9, raw_array(8, 2**62))]),
        "value of 'tokenizer.a', 4611686018427387904 items: needs",
    ),
    "a skipped string past the end": (
        raw_file([raw_key(b"tokenizer.a", 9, raw_array(8, 2, struct.pack("<QQ", 2**63, 0)))]),
        "runs past the end of the file",
    ),
    "the last skipped string past the end": (
        raw_file([raw_key(b"tokenizer.a", 9, raw_array(8, 1, struct.pack("<Q", 1)))]),
        "runs past the end of the file",
    ),
    "nested arrays": (
        raw_file([raw_key(b"a", 9, raw_array(9, 1, raw_array(9, 1, raw_array(0, 1, b"\1"))))]),
        "value of 'a': arrays of arrays are not read",
    ),
    "an array of an unknown type": (
        raw_file([raw_key(b"a", 9, raw_array(77, 1, bytes(9)))]),
        "unknown item type 77",
    ),
    "an alignment of 0": (
        gguf_bytes(NAME | {"general.alignment": 0}),
        "general.alignment: 0 is no power of two",
    ),
    "an alignment of 24": (gguf_bytes(NAME | {"general.alignment": 24}), "24 is no power of two"),
    "an alignment of text": (gguf_bytes(NAME | {"general.alignment": "32"}), "is no integer"),
    "no dimensions": (raw_file([PAD], [raw_tensor(dims=())]), "dimensions of tensor 't': 0 is not"),
    "five dimensions": (raw_file([PAD], [raw_tensor(dims=(1,) * 5)]), "5 is not 1 to 4"),
    "2^32 - 1 dimensions": (
        raw_file([PAD], [raw_tensor(num_dims=2**32 - 1)]),
        "4294967295 is not 1 to 4",
    ),
    "a dimension of 0": (raw_file([PAD], [raw_tensor(dims=(32, 0))]), "no usable number"),
    "a product that overflows": (
        raw_file([PAD], [raw_tensor(dims=(2**32, 2**32))]),
        r"shape of tensor 't': \[4294967296, 4294967296\] has no usable number",
    ),
    "an unknown tensor type": (raw_file([PAD], [raw_tensor(type_id=4)]), "unknown ggml type 4"),
    "rows that part a block": (
        raw_file([PAD], [raw_tensor(dims=(33,), type_id=8)]),
        "rows of 33 are no multiple of Q8_0's 32",
    ),
    "an empty tensor name": (raw_file([PAD], [raw_tensor(name=b"")]), "tensor name: is empty"),
    "a misaligned offset": (
        raw_file([PAD], [raw_tensor(offset=16)]),
        "offset of tensor 't': 16 is no multiple of the alignment 32",
    ),
    "an offset past 2^63": (raw_file([PAD], [raw_tensor(offset=2**64 - 32)]), "is past 2"),
    "overlapping tensors": (
        gguf_bytes(NAME, [ONE, Tensor("blk.0.b", (32,), offset=128)]),
        "offset of tensor 'blk.0.b': 128 lies within tensor 'blk.0.a', which ends at 256",
    ),
    "a duplicate tensor": (gguf_bytes(NAME, [ONE, ONE]), "tensor 'blk.0.a': is a duplicate"),
    "a directory that ends early": (
        gguf_bytes(NAME, [ONE, Tensor("blk.0.b", (1,))], with_data=False)[:-4],
        "offset of tensor 'blk.0.b': needs 8 bytes, 4 remain",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_names_file_byte_and_field(tmp_path, case):
    content, says = HOSTILE[case]
    path = tmp_path / "evil.gguf"
    path.write_bytes(content)
    with pytest.raises(GeometryError, match=says) as caught:
        read_header(path)
    assert "evil.gguf: at byte " in str(caught.value)


def test_an_architecture_that_is_missing_or_no_text_is_refused(tmp_path):
    for metadata in ({"a": 1}, {"general.architecture": 3}):
        path = tmp_path / "evil.gguf"
        path.write_bytes(gguf_bytes(metadata))
        with pytest.raises(GeometryError, match=r"general\.architecture is missing or no text"):
            geometry_from_header(read_header(path), "m")


@pytest.mark.slow
def test_a_per_layer_array_of_millions_is_refused_by_its_length(tmp_path):
    path = tmp_path / "evil.gguf"
    huge = Typed("u8", [1] * (2**20 + 1))
    path.write_bytes(
        gguf_bytes(NAME | {"llama.block_count": 2, "llama.attention.head_count_kv": huge})
    )
    with pytest.raises(GeometryError, match="head_count_kv is an array of 1048577 items"):
        geometry_from_header(read_header(path), "m")


# --- mutations ----------------------------------------------------------------------------------


def base_files():
    """Three small models, of every kind of key that the reader knows."""

    def keys(arch, layers, **more):
        dense = {
            "block_count": layers,
            "embedding_length": 128,
            "context_length": 4096,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.key_length": 64,
            "attention.value_length": 64,
        }
        own = {f"{arch}.{key.replace('__', '.')}": value for key, value in (dense | more).items()}
        return {
            "general.architecture": arch,
            **own,
            "tokenizer.ggml.tokens": ["a", "bc", "def"],
            "tokenizer.ggml.scores": [0.5, 1.5, 2.5],
            "tokenizer.ggml.model": "gpt2",
        }

    def headers(metadata, layers):
        blocks = [Tensor(f"blk.{i}.attn_q.weight", (32, 3), "Q8_0") for i in range(layers)]
        ends = Tensor("token_embd.weight", (32, 3)), Tensor("output_norm.weight", (32,))
        return gguf_bytes(metadata, [*ends, *blocks], with_data=False)

    return (
        headers(keys("llama", 3), 3),
        headers(
            keys(
                "gemma4",
                4,
                attention__head_count_kv=[2, 1, 2, 1],
                attention__sliding_window=16,
                attention__sliding_window_pattern=[True, False, True, False],
                attention__key_length_swa=32,
                attention__value_length_swa=32,
                attention__shared_kv_layers=1,
            ),
            4,
        ),
        headers(
            keys(
                "qwen35",
                5,
                nextn_predict_layers=1,
                full_attention_interval=4,
                ssm__state_size=16,
                ssm__group_count=2,
                ssm__time_step_rank=4,
                ssm__conv_kernel=4,
            ),
            5,
        ),
    )


LENGTHS = (0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1)


def mutate(content, seed):
    """One mutation of ``content``: bytes flipped, cut off, taken out or put in, a length edited."""
    rng = random.Random(seed)
    data = bytearray(content)
    how = rng.choice(("flip", "flip", "length", "length", "truncate", "delete", "insert"))
    at = rng.randrange(len(data))
    if how == "flip":
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "length":
        width, code = rng.choice(((4, "<I"), (8, "<Q")))
        value = rng.choice(LENGTHS) % 2 ** (8 * width)
        data[at : at + width] = struct.pack(code, value)
    elif how == "truncate":
        del data[at:]
    elif how == "delete":
        del data[at : at + rng.randint(1, 16)]
    else:
        data[at:at] = rng.randbytes(rng.randint(1, 16))
    return bytes(data)


def read_and_size(path):
    """The geometry of ``path`` and its sizes; AssertionError if they do not add up."""
    header = read_header(path)
    geometry = geometry_from_header(header, "mutated")
    every = (*geometry.layers, *geometry.nextn_layers)
    sized = size_layers(
        geometry,
        [F32] * len(every),
        range(geometry.num_layers),
        CacheOptions(spec_tokens=1),
        with_nextn=True,
    )
    rows = {LayerKind.FULL: 0, LayerKind.LATENT: 0, LayerKind.SLIDING: 0}
    for layer in every:
        if layer.kind in rows:
            rows[layer.kind] += sum(layer_bytes_per_token(layer, F32))
    assert sized.bytes_per_token == rows[LayerKind.FULL] + rows[LayerKind.LATENT]
    assert sized.ring_bytes_per_token == rows[LayerKind.SLIDING]
    assert len(every) == header.metadata[f"{header.architecture}.block_count"]
    assert sized.context_bytes(64) > 0
    return geometry


class TooSlow(BaseException):
    pass


def too_slow(signum, frame):
    raise TooSlow


def main(num_cases):
    """Read ``num_cases`` mutations under the limits; print what became of them as JSON."""
    counts = {"refused": 0, "same": 0, "changed": 0}
    failures = []
    bases = base_files()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        unmutated = []
        for base in bases:
            path.write_bytes(base)
            unmutated.append(read_and_size(path))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + CASE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        signal.signal(signal.SIGPROF, too_slow)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for seed in range(num_cases):
            path.write_bytes(mutate(bases[seed % len(bases)], seed))
            signal.setitimer(signal.ITIMER_PROF, CASE_SECONDS)
            try:
                geometry = read_and_size(path)
                same = geometry == unmutated[seed % len(bases)]
                counts["same" if same else "changed"] += 1
            except MemkvError:
                counts["refused"] += 1
            except BaseException as error:  # noqa: BLE001 - whatever it is, the seed is reported
                failures.append(f"seed {seed}: {type(error).__name__}: {error}")
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
    json.dump({**counts, "grown_bytes": grown * 1024, "failures": failures}, sys.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and RLIMIT_AS")
@pytest.mark.parametrize(
    "num_cases",
    [pytest.param(2_000, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.full)],
)
def test_mutated_headers_are_refused_or_describe_a_model_that_can_be_sized(num_cases):
    child = subprocess.run(
        [sys.executable, __file__, str(num_cases)], capture_output=True, text=True, timeout=200
    )
    assert child.returncode == 0, child.stderr[-2000:]
    found = json.loads(child.stdout)
    assert found["failures"] == []
    assert found["refused"] > 0
    assert found["same"] > 0
    assert found["changed"] > 0
    assert found["refused"] + found["same"] + found["changed"] == num_cases
    assert found["grown_bytes"] < CASE_BYTES


if __name__ == "__main__":
    main(int(sys.argv[1]))
