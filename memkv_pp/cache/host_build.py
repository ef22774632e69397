"""Compiles a host kernel with the machine's C++ compiler, once, into an owner-only directory.

A library's name holds a digest of all that decides its code: the sources, the flags, the
compiler's version and the CPU features that the compiler sees. Another machine, another compiler
or another source is another file::

    $XDG_CACHE_HOME/memkv-pp/kernels/      0700
        .lock                              held while one process compiles
        codec_host-<digest>.so

What is in that directory is loaded into the process: one that somebody else could have written
is refused.
"""

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memkv_pp.errors import ConfigError

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off")
NATIVE = ("-march=native", "-mcpu=native")

_PACKAGE = Path(__file__).parent.parent
_TIMEOUT_S = 180.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolchain:
    """A compiler, what it calls itself, its flags for a CPU, and the macros these define."""

    compiler: str
    version: str
    cpu_flags: tuple[str, ...]
    cpu_features: str


def kernel_sources() -> Path:
    """The ``kernels`` folder: inside an installed package, beside it in a checkout."""
    shipped = _PACKAGE / "kernels_src"
    return shipped if shipped.is_dir() else _PACKAGE.parent / "kernels"


def host_sources() -> list[Path]:
    """Every source of host kernels; ConfigError where the package came without them."""
    found = sorted((kernel_sources() / "host").glob("*.cpp"))
    if not found:
        raise ConfigError(f"no kernel sources in {kernel_sources()}", "install the package whole")
    return found


def find_toolchain(named: str | None, cpu_flags: Sequence[str] | None = None) -> Toolchain:
    """The compiler called ``named``, else the first of ``COMPILERS`` on the path.

    ``cpu_flags`` are for this machine's CPU unless they are given. ConfigError without a compiler
    that works.
    """
    compiler = next(filter(None, map(shutil.which, (named,) if named else COMPILERS)), None)
    if compiler is None:
        found = f"CXX: {named!r} is not found" if named else f"none of {', '.join(COMPILERS)}"
        raise ConfigError(f"no C++ compiler: {found}", "install g++ or clang++, or set CXX")
    version = _output([compiler, "--version"])
    candidates = [(flag,) for flag in NATIVE] if cpu_flags is None else [tuple(cpu_flags)]
    for flags in candidates:
        try:
            features = _output([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])
        except ConfigError:
            continue
        return Toolchain(compiler=compiler, version=version, cpu_flags=flags, cpu_features=features)
    raise ConfigError(
        f"{compiler} takes none of {' '.join(flag for flags in candidates for flag in flags)}",
        "set CXX to g++ or clang++ for this machine",
    )


def library_path(source: Path, toolchain: Toolchain, cache: Path) -> Path:
    """Where the library of ``source`` lies in ``cache``, built or not."""
    digest = hashlib.sha256()
    headers = sorted((source.parent.parent / "codec").glob("*.h")) + sorted(
        source.parent.glob("*.h")
    )
    for path in (source, *headers):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    said = (*FLAGS, *toolchain.cpu_flags, toolchain.compiler, toolchain.version)
    digest.update("\0".join((*said, toolchain.cpu_features)).encode())
    return cache / f"{source.stem}-{digest.hexdigest()[:32]}.so"


def build(source: Path, toolchain: Toolchain, cache: Path) -> Path:
    """The library of ``source``, compiled into ``cache`` unless it is there.

    Any number of processes may build at once: one compiles, the others wait and take its library.
    ConfigError for a directory that others can write or that cannot be written, and for a source
    that does not compile.
    """
    library = library_path(source, toolchain, cache)
    try:
        for directory in (cache.parent, cache):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(directory)
        if not library.exists():
            with (cache / ".lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not library.exists():
                    _compile(source, toolchain, library)
        _check_owner(library)
    except OSError as error:
        raise ConfigError(
            f"the kernel cache {cache} cannot be used: {error.strerror or error}",
            "make it writable, or set XDG_CACHE_HOME to a directory of your own",
        ) from error
    return library


def _check_owner(path: Path) -> None:
    found = path.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid():
        wrong = f"belongs to user {found.st_uid}, this process runs as {os.geteuid()}"
    elif stat.S_ISLNK(found.st_mode):
        wrong = "is a symbolic link"
    elif mode & (stat.S_IWGRP | stat.S_IWOTH):
        wrong = f"can be written by others (mode {mode:03o})"
    else:
        return
    raise ConfigError(
        f"the kernel cache {path} {wrong}",
        "remove it, or set XDG_CACHE_HOME to a directory of your own",
    )


def _compile(source: Path, toolchain: Toolchain, library: Path) -> None:
    handle, temporary = tempfile.mkstemp(
        dir=library.parent, prefix=f"{source.stem}-", suffix=".tmp"
    )
    os.close(handle)
    try:
        _output([toolchain.compiler, *FLAGS, *toolchain.cpu_flags, str(source), "-o", temporary])
        Path(temporary).chmod(0o700)
        Path(temporary).replace(library)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _output(command: list[str]) -> str:
    """What ``command`` prints; ConfigError with the end of its complaint if it fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise ConfigError(
            f"{' '.join(command)} failed: {str(said).strip()[-500:]}", "set CXX to a working g++"
        ) from error
    return done.stdout
