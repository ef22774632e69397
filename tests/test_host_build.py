"""Kernels are compiled once, into a directory that only this user can write, or not at all."""

import ctypes
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memkv_pp import config
from memkv_pp.cache import host_build
from memkv_pp.cache.codec import decode, encode
from memkv_pp.errors import ConfigError
from memkv_pp.formats import parse_format

NOBODY = 65534
TINY = 'extern "C" int answer() { return 42; }\n'

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, host_build.COMPILERS)), reason="no C++ compiler"
)


@pytest.fixture
def tiny(tmp_path):
    """A source that compiles at once."""
    source = tmp_path / "kernels" / "host" / "tiny.cpp"
    source.parent.mkdir(parents=True)
    source.write_text(TINY)
    return source


@pytest.fixture
def counted(tmp_path):
    """A compiler that writes down what it compiles, and its log."""
    compiler = next(filter(None, map(shutil.which, host_build.COMPILERS)))
    script, log = tmp_path / "counting-c++", tmp_path / "log"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *-shared*) echo "$$" >> {log}; sleep 0.2;; esac\nexec {compiler} "$@"\n'
    )
    script.chmod(0o755)
    return str(script), log


@pytest.mark.slow
def test_a_library_is_compiled_once_for_sources_flags_compiler_and_cpu(tiny, counted, tmp_path):
    compiler, log = counted
    toolchain, cache = host_build.find_toolchain(compiler), tmp_path / "cache" / "kernels"
    first = host_build.build(tiny, toolchain, cache)
    assert ctypes.CDLL(str(first)).answer() == 42
    assert stat.S_IMODE(cache.stat().st_mode) == stat.S_IMODE(cache.parent.stat().st_mode) == 0o700
    assert host_build.build(tiny, toolchain, cache) == first
    assert len(log.read_text().split()) == 1
    others = {
        host_build.build(tiny, replace(toolchain, cpu_features="another CPU"), cache),
        host_build.build(tiny, replace(toolchain, version="another version"), cache),
        host_build.build(tiny, replace(toolchain, cpu_flags=("-O1",)), cache),
    }
    (tiny.parent / "one.h").write_text("")
    others.add(host_build.build(tiny, toolchain, cache))
    tiny.write_text('extern "C" int answer() { return 43; }\n')
    newest = host_build.build(tiny, toolchain, cache)
    assert ctypes.CDLL(str(newest)).answer() == 43
    assert len(others | {first, newest}) == 6
    assert len(log.read_text().split()) == 6
    assert not list(cache.glob("*.tmp"))


@pytest.mark.slow
def test_two_processes_at_once_compile_one_library(tiny, counted, tmp_path):
    compiler, log = counted
    cache = tmp_path / "cache" / "kernels"
    program = (
        "import sys; from pathlib import Path; from memkv_pp.cache import host_build as b\n"
        "sys.stdin.readline()\n"
        f"print(b.build(Path({str(tiny)!r}), b.find_toolchain({compiler!r}), Path({str(cache)!r})))"
    )
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    paths = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert paths[0] == paths[1]
    assert len(log.read_text().split()) == 1


def test_a_directory_that_others_can_write_is_refused(tiny, tmp_path):
    toolchain = host_build.find_toolchain(None)
    cache = tmp_path / "cache" / "kernels"
    library = host_build.build(tiny, toolchain, cache)
    for path in (cache, cache.parent, library):
        for mode in (0o770, 0o702):
            path.chmod(mode)
            with pytest.raises(
                ConfigError, match=rf"{path} can be written by others .mode {mode:o}"
            ):
                host_build.build(tiny, toolchain, cache)
        path.chmod(0o700)
    assert host_build.build(tiny, toolchain, cache) == library
    (tmp_path / "linked").mkdir(mode=0o700)
    (tmp_path / "linked" / "kernels").symlink_to(cache)
    with pytest.raises(ConfigError, match="is a symbolic link"):
        host_build.build(tiny, toolchain, tmp_path / "linked" / "kernels")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tiny, tmp_path):
    toolchain = host_build.find_toolchain(None)
    cache = tmp_path / "cache" / "kernels"
    library = host_build.build(tiny, toolchain, cache)
    for path in (cache, library):
        os.chown(path, NOBODY, NOBODY)
        with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}, this process runs as 0"):
            host_build.build(tiny, toolchain, cache)
        os.chown(path, 0, 0)


def test_a_read_only_directory_serves_what_it_holds_and_takes_nothing_new():
    root = os.geteuid() == 0
    place = Path(tempfile.mkdtemp())
    try:
        source, cache = place / "kernels" / "host" / "tiny.cpp", place / "cache" / "kernels"
        source.parent.mkdir(parents=True)
        source.write_text(TINY)
        toolchain = host_build.find_toolchain(None)
        library = host_build.build(source, toolchain, cache)
        cache.chmod(0o500)
        if root:  # whom no mode keeps out
            place.chmod(0o755)
            for path in (cache.parent, cache, library):
                os.chown(path, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        assert host_build.build(source, toolchain, cache) == library
        with pytest.raises(
            ConfigError, match=r"kernels cannot be used: Permission denied.*XDG_CACHE"
        ):
            host_build.build(source, replace(toolchain, cpu_features="another CPU"), cache)
    finally:
        if root:
            os.seteuid(0)
        (place / "cache" / "kernels").chmod(0o700)
        shutil.rmtree(place)


def test_a_source_that_does_not_compile_says_why_and_leaves_nothing(tiny, tmp_path):
    tiny.write_text("int answer( {\n")
    cache = tmp_path / "cache" / "kernels"
    with pytest.raises(ConfigError, match=r"tiny\.cpp.*error"):
        host_build.build(tiny, host_build.find_toolchain(None), cache)
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_compiler_that_is_not_there_or_is_none_is_named():
    with pytest.raises(ConfigError, match="CXX: 'no-such-compiler' is not found"):
        host_build.find_toolchain("no-such-compiler")
    with pytest.raises(ConfigError, match=r"false .*failed"):
        host_build.find_toolchain("false")


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["no compiler", "cache is a file"])
def test_without_kernels_torch_serves_after_one_warning_with_the_same_answers(cause, tmp_path):
    (tmp_path / "memkv-pp").write_text("")
    environment = (
        os.environ
        | {
            "no compiler": {"CXX": "no-such-compiler"},
            "cache is a file": {"XDG_CACHE_HOME": str(tmp_path)},
        }[cause]
    )
    program = """
import json, sys, warnings, torch
from memkv_pp.cache import host_kernels, ops
from memkv_pp.cli.doctor import all_checks
from memkv_pp.formats import parse_format
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    loaded = [host_kernels.load() for _ in range(3)]
fmt = parse_format("q5_1")
parts = [torch.zeros(2, 1, 2, width, dtype=torch.uint8) for width in (40, 8, 0)]
side = ops.SideView(fmt, 64, *parts)
values = torch.arange(192.0).reshape(3, 1, 64)
ops.append(side, torch.tensor([1, -1, 0]), torch.tensor([1, 1, 0]), values)
check = next(check for check in all_checks() if check.check == "host kernels")
print(json.dumps({
    "loaded": [kernels is not None for kernels in loaded],
    "warnings": [f"{w.category.__name__}: {w.message}" for w in caught],
    "check": [check.ok, check.found, check.hint],
    "rows": ops.gather(side, torch.tensor([1, 0]), torch.float32).flatten().tolist(),
}))
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=environment, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    answer = json.loads(ran.stdout)
    assert answer["loaded"] == [False] * 3
    (warning,) = answer["warnings"]
    assert warning.startswith("RuntimeWarning: host kernels are not used: ")
    ok, found, hint = answer["check"]
    assert not ok
    assert found in warning
    assert hint
    rows = torch.arange(192.0).reshape(3, 64)
    fmt = parse_format("q5_1")
    expected = torch.zeros(4, 64)
    expected[1] = decode(fmt, *encode(fmt, rows[0]), 64, torch.float32)
    expected[2] = decode(fmt, *encode(fmt, rows[2]), 64, torch.float32)
    assert torch.tensor(answer["rows"]).equal(expected.flatten())


def test_the_environment_says_where_kernels_lie_and_what_compiles_them(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setenv("CXX", "g++-13")
    assert config.cache_directory() == Path("/somewhere/memkv-pp/kernels")
    assert config.compiler() == "g++-13"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("CXX", "")
    assert config.cache_directory() == Path.home() / ".cache" / "memkv-pp" / "kernels"
    assert config.compiler() is None
