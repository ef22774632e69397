"""``memkv-pp doctor``: what of this machine the package can use."""

import argparse
import importlib.util
import re
import shutil
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from memkv_pp import config
from memkv_pp.cache import host_build
from memkv_pp.cli import options
from memkv_pp.cli.output import Table, write_result
from memkv_pp.errors import ConfigError
from memkv_pp.units import GIB, format_size

MODULES = {
    "torch": "torch",
    "numpy": "numpy",
    "ray": "ray",
    "pyzmq": "zmq",
    "gguf": "gguf",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
}
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the report; ``hint`` is empty where all is well."""

    check: str
    ok: bool
    found: str
    hint: str = ""


def add_parser(commands: Any) -> None:
    """Add ``doctor`` to the subcommands."""
    parser = commands.add_parser(
        "doctor",
        help="what of this machine can be used",
        description="Look at Python, the packages, the compiler, the GPUs and the space there is.\n"
        "A missing GPU is no fault: everything runs on CPUs.",
        epilog="examples:\n  memkv-pp doctor\n  memkv-pp doctor --json",
    )
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything and write the report; the exit code is 0 whatever was found."""
    checks = all_checks()
    columns = ("check", "ok", "found", "hint")
    table = Table(
        title="memkv-pp doctor",
        columns=columns,
        rows=[(c.check, "yes" if c.ok else "NO", c.found, c.hint) for c in checks],
    )
    write_result(
        "doctor", {"checks": [asdict(check) for check in checks]}, [table], as_json=args.json
    )
    return 0


def all_checks() -> list[Check]:
    """Every check, in the order of the report."""
    ranges = declared_ranges()
    return [
        _python(),
        *(package_check(name, module, ranges) for name, module in MODULES.items()),
        compiler_check(),
        _host_kernels(),
        _cuda(),
        _space("shared memory", SHARED_MEMORY, GIB, "Ray keeps objects there: mount it larger"),
        _space("disk", Path(tempfile.gettempdir()), GIB, "the disk tier and Ray need room"),
    ]


def declared_ranges() -> dict[str, str]:
    """This package's own requirements: ``{"transformers": ">=5.24,<5.25"}``."""
    found: dict[str, str] = {}
    for requirement in metadata.requires("memkv-pp") or ():
        match = re.match(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?\s*([^;]*)", requirement)
        if match and "extra ==" not in requirement:
            found[match.group(1).lower()] = match.group(2).strip()
    return found


def within(version: str, allowed: str) -> bool:
    """Whether ``version`` meets every ``>=`` and ``<`` bound of ``allowed``.

    >>> within("5.24.1", ">=5.24,<5.25"), within("5.25.0", ">=5.24,<5.25")
    (True, False)
    """
    bounds = re.findall(r"(>=|<)\s*([0-9.]+)", allowed)
    return all(
        (_numbers(version) >= _numbers(bound)) == (operator == ">=") for operator, bound in bounds
    )


def package_check(name: str, module: str, ranges: dict[str, str]) -> Check:
    """Whether ``name`` is installed within its declared range and ``module`` can be imported."""
    allowed = ranges.get(name, "")
    wanted = f"pip install '{name}{allowed}'"
    try:
        version = metadata.version(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except metadata.PackageNotFoundError:
        return Check(check=name, ok=False, found="not installed", hint=wanted)
    except (ImportError, OSError) as error:
        return Check(check=name, ok=False, found=f"not importable: {error}", hint=wanted)
    if not within(version, allowed):
        return Check(check=name, ok=False, found=f"{version}, outside {allowed}", hint=wanted)
    return Check(check=name, ok=True, found=version)


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers, without trailing zeros: ``2.13.0+cpu`` is (2, 13)."""
    release = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    numbers = [int(part) for part in release.group().split(".")] if release else [0]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _python() -> Check:
    ok = sys.version_info >= (3, 11)
    found = ".".join(str(part) for part in sys.version_info[:3])
    return Check(check="python", ok=ok, found=found, hint="" if ok else "use Python 3.11 or later")


def compiler_check() -> Check:
    """The compiler of the host kernels: CXX's, else the first there is."""
    try:
        found = host_build.find_toolchain(config.compiler()).compiler
    except ConfigError as error:
        return Check(
            check="c++ compiler",
            ok=False,
            found=f"{error.message}; numpy and torch code serves, slower",
            hint=error.hint,
        )
    return Check(check="c++ compiler", ok=True, found=found)


def _host_kernels() -> Check:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from memkv_pp.cache import host_kernels

            status = host_kernels.status()
    except ImportError as error:
        return Check(check="host kernels", ok=False, found=str(error), hint="reinstall torch")
    return Check(check="host kernels", ok=status.ok, found=status.found, hint=status.hint)


def _cuda() -> Check:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch

            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            names = [torch.cuda.get_device_name(i) for i in range(count)]
    except (ImportError, OSError, RuntimeError) as error:
        return Check(
            check="cuda", ok=False, found=str(error), hint="reinstall torch or fix the driver"
        )
    if names and importlib.util.find_spec("cupy") is None:
        return Check(
            check="cuda",
            ok=False,
            found=f"{', '.join(names)}, but no CuPy: torch code serves, slower",
            hint="pip install 'memkv-pp[gpu]'",
        )
    return Check(check="cuda", ok=True, found=", ".join(names) or "none: CPU mode")


def _space(name: str, path: Path, least_bytes: int, hint: str) -> Check:
    if not path.exists():
        return Check(check=name, ok=False, found=f"{path} is missing", hint=hint)
    usage = shutil.disk_usage(path)
    ok = usage.free >= least_bytes
    return Check(
        check=name,
        ok=ok,
        found=f"{path}: {format_size(usage.free)} free of {format_size(usage.total)}",
        hint="" if ok else hint,
    )
