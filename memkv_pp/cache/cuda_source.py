"""The text of a CUDA kernel file, its own headers written into it.

One text is what NVRTC is given, what caches are keyed by, and what the tests run by emulation.
"""

import re
from functools import cache

from memkv_pp.cache.host_build import kernel_sources

_INCLUDE = re.compile(r'#include "([^"]+)"')


@cache
def kernel_source(name: str) -> str:
    """``kernels/cuda/<name>.cu`` with every quoted include replaced, once, by its text.

    ``#line`` keeps compilers naming the original files.
    """
    lines: list[str] = []
    _expand(f"cuda/{name}.cu", lines, set())
    return "\n".join(lines) + "\n"


def _expand(path: str, lines: list[str], seen: set[str]) -> None:
    if path in seen:
        return
    seen.add(path)
    text = (kernel_sources() / path).read_text(encoding="utf-8")
    lines.append(f'#line 1 "{path}"')
    for number, line in enumerate(text.splitlines(), start=1):
        include = _INCLUDE.fullmatch(line.strip())
        if include:
            _expand(include.group(1), lines, seen)
            lines.append(f'#line {number + 1} "{path}"')
        elif line.strip() != "#pragma once":
            lines.append(line)
