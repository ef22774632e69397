"""Every CUDA source compiles for every architecture it is meant for, warnings being errors.

nvcc does it where it is installed, else NVRTC (the package ``nvidia-cuda-nvrtc-cu12``), which is
what compiles the kernels on a machine that runs them. Neither needs a device. ``make check`` and
``make full`` run this file.
"""

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from memkv_pp.cache.cuda_launch import (
    ATTEND,
    CODEC,
    COPY,
    CUDA_FORMATS,
    ROTATE,
    append_kernel,
    attend_kernel,
    exponents_kernel,
    gather_kernel,
    merge_kernel,
    rotate_kernel,
)
from memkv_pp.cache.cuda_recurrent import SCAN, conv_kernel, scan_kernel
from memkv_pp.cache.cuda_source import kernel_source
from memkv_pp.cache.host_build import kernel_sources
from memkv_pp.formats import parse_format

pytestmark = [pytest.mark.slow, pytest.mark.full]

ARCHITECTURES = (80, 90, 120)
BF16 = torch.bfloat16
KERNELS = {
    CODEC: [append_kernel(parse_format(name), BF16) for name in CUDA_FORMATS]
    + [gather_kernel(parse_format(name), BF16) for name in ("q8_0", "q5_1", "fp8", "turbo3")]
    + [exponents_kernel(parse_format(name), BF16) for name in ("nvfp4e", "turbo4e")],
    ATTEND: [
        attend_kernel(parse_format("q8_0"), parse_format("q5_1"), BF16, 4),
        attend_kernel(parse_format("bf16"), parse_format("q4_0"), torch.float32, 1),
        attend_kernel(parse_format("turbo4"), parse_format("nvfp4e"), BF16, 8),
        merge_kernel(BF16),
    ],
    COPY: ["copy_records", "copy_state"],
    ROTATE: [rotate_kernel(BF16, size) for size in (64, 512)],
    SCAN: [scan_kernel(BF16, size) for size in (32, 128, 256)] + [conv_kernel(BF16)],
}


def compile_with_nvcc(compiler, source, directory):
    """What the compiler says of ``source`` for all architectures; empty when it compiles."""
    kept = ", ".join(f"(void*){kernel}" for kernel in KERNELS[source])
    text = directory / f"{source}.cu"
    text.write_text(f"{kernel_source(source)}\nvoid* memkv_kernels[] = {{{kept}}};\n")
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    strict = ["-std=c++17", "-Werror", "all-warnings"]
    command = [compiler, *strict, *targets, "-fatbin", text, "-o", directory / f"{source}.fatbin"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return ran.stderr + ran.stdout if ran.returncode else ""


def compile_with_nvrtc(library, source):
    """As ``compile_with_nvcc``: the library's log for each architecture that fails."""
    logs = []
    for architecture in ARCHITECTURES:
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        text = kernel_source(source).encode()
        assert not library.nvrtcCreateProgram(
            ctypes.byref(program), text, f"{source}.cu".encode(), 0, None, None
        )
        for kernel in KERNELS[source]:
            assert not library.nvrtcAddNameExpression(program, kernel.encode())
        options = (ctypes.c_char_p * 2)(b"-std=c++17", f"-arch=sm_{architecture}".encode())
        if library.nvrtcCompileProgram(program, len(options), options):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            logs.append(f"sm_{architecture}: {log.value.decode()}")
        library.nvrtcDestroyProgram(ctypes.byref(program))
    return "\n".join(logs)


def find_nvrtc():
    """The NVRTC library of the installed package, or None."""
    try:
        package = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        return None
    places = list(package.submodule_search_locations or ()) if package else []
    found = [path for place in places for path in Path(place).glob("lib/libnvrtc.so*")]
    return ctypes.CDLL(str(found[0])) if found else None


def test_every_source_is_compiled():
    sources = {path.stem for path in (kernel_sources() / "cuda").glob("*.cu")}
    assert sources == set(KERNELS)


@pytest.mark.parametrize("source", KERNELS)
def test_a_source_compiles_for_every_architecture(source, tmp_path):
    compiler = shutil.which("nvcc")
    if compiler:
        assert compile_with_nvcc(compiler, source, tmp_path) == ""
        return
    library = find_nvrtc()
    if library is None:
        pytest.skip("neither nvcc nor NVRTC is installed: pip install nvidia-cuda-nvrtc-cu12")
    assert compile_with_nvrtc(library, source) == ""
