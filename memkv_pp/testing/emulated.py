"""Runs the CUDA kernels on the CPU: their own sources as host C++, every thread a fiber.

``kernels/emulation/emulator.h`` says how blocks, barriers and shuffles behave. ``seed`` orders the
threads: 0 ascending, 1 descending, others shuffled; a kernel that waits for what it needs gives the
same bytes for every seed.
"""

import ctypes
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from memkv_pp.cache.cuda_launch import Argument
from memkv_pp.cache.cuda_source import kernel_source
from memkv_pp.cache.host_build import find_toolchain
from memkv_pp.errors import InternalError

FLAGS = ("-std=c++17", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC", "-DMEMKV_EMULATE")


class KernelFault(InternalError):
    """The emulation found a kernel at fault: a stuck warp, or shared memory written past its end."""


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
    )


class EmulatedLauncher:
    """A ``Launcher`` for CPU tensors, of the kernels it was built for.

    ``kernels`` names them per source. Each source is compiled once, at its first launch, into
    ``directory``, which must be the caller's own. ``edit`` changes a source before it is compiled:
    tests break kernels with it. ConfigError where there is no C++ compiler.
    """

    def __init__(
        self,
        directory: Path,
        kernels: Mapping[str, Sequence[str]],
        *,
        seed: int = 0,
        edit: Callable[[str], str] = str,
    ) -> None:
        self.seed = seed
        self._compiler = find_toolchain(None, cpu_flags=()).compiler
        self._directory = directory
        self._kernels = kernels
        self._edit = edit
        self._libraries: dict[str, ctypes.CDLL] = {}

    def launch(
        self,
        source: str,
        kernel: str,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Argument],
    ) -> None:
        """Run ``kernel`` to its end. KernelFault, with memory half written, for a kernel at fault."""
        if kernel not in self._kernels.get(source, ()):
            raise InternalError(f"the emulation was not built for {kernel} of {source}")
        if source not in self._libraries:
            self._libraries[source] = self._compile(source)
        function = self._libraries[source][_symbol(self._kernels[source].index(kernel))]
        function.restype = ctypes.c_char_p
        values = [_value(argument) for argument in arguments]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        launch = _Launch((ctypes.c_uint32 * 3)(*grid), threads, shared_bytes, self.seed)
        error = function(ctypes.byref(launch), places)
        if error is not None:
            raise KernelFault(f"{kernel}: {error.decode()}")

    def _compile(self, source: str) -> ctypes.CDLL:
        exports = [
            f"MEMKV_EMULATED({_symbol(index)}, {kernel})"
            for index, kernel in enumerate(self._kernels[source])
        ]
        text = self._directory / f"{source}.cpp"
        text.write_text(
            "\n".join([self._edit(kernel_source(source)), *exports]) + "\n", encoding="utf-8"
        )
        library = text.with_suffix(".so")
        command = [self._compiler, *FLAGS, str(text), "-o", str(library)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise InternalError(f"{source} does not compile for emulation: {ran.stderr[:2000]}")
        return ctypes.CDLL(str(library))


def _symbol(index: int) -> str:
    return f"memkv_emulated_{index}"


def _value(argument: Argument) -> ctypes.Array[ctypes.c_char]:
    """The bytes of an argument's value, as a kernel takes it."""
    if isinstance(argument, torch.Tensor):
        argument = np.uint64(argument.data_ptr())
    return ctypes.create_string_buffer(argument.tobytes(), argument.nbytes)
