"""Compiles and loads the host kernels: once in a process, before its stage is ready.

``load`` takes every ``kernels/host/*.cpp``, so that no token waits for a compiler. Where that fails
torch code serves, slower: ``load`` says so once, and ``status`` at any time.
"""

import ctypes
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memkv_pp import config
from memkv_pp.cache import host_build
from memkv_pp.cache.host_codec import HostCodec
from memkv_pp.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class HostKernels:
    """The loaded kernels. ``libraries`` holds every source's, by its name without ``.cpp``."""

    codec: HostCodec
    libraries: dict[str, ctypes.CDLL]


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Whether the kernels serve, which ones or why not, and what to do about it."""

    ok: bool
    found: str
    hint: str = ""


_lock = threading.Lock()
_loaded: HostKernels | None = None
_status: Status | None = None


def load() -> HostKernels | None:
    """The kernels, compiled and loaded on the first call; None, after one warning, without them."""
    global _loaded, _status
    with _lock:
        if _status is None:
            cache = config.cache_directory()
            try:
                _loaded = _load(cache)
                _status = Status(ok=True, found=f"{_loaded.codec.path} code in {cache}")
            except ConfigError as error:
                _status = Status(ok=False, found=error.message, hint=error.hint)
                warnings.warn(
                    f"host kernels are not used: {error}; torch code serves, slower",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return _loaded


def loaded() -> HostKernels | None:
    """The kernels if ``load`` found them before; does not try to."""
    return _loaded


@contextmanager
def set_aside() -> Iterator[None]:
    """Inside, ``load`` and ``loaded`` find nothing, on any thread: to compare with torch code."""
    global _loaded
    with _lock:
        kept, _loaded = _loaded, None
    try:
        yield
    finally:
        with _lock:
            _loaded = kept


def status() -> Status:
    """What ``load`` found; loads on the first call."""
    load()
    assert _status is not None
    return _status


def open_library(path: Path) -> ctypes.CDLL:
    """The library at ``path``, loaded; ConfigError if the system refuses it."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be loaded: {error}", f"remove {path}") from error


def _load(cache: Path) -> HostKernels:
    toolchain = host_build.find_toolchain(config.compiler())
    libraries = {
        source.stem: open_library(host_build.build(source, toolchain, cache))
        for source in host_build.host_sources()
    }
    return HostKernels(codec=HostCodec(libraries["codec_host"]), libraries=libraries)
