"""What a process has held in memory, from the kernel's own account."""

import contextlib
import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def reset_peak() -> None:
    """Start the peak anew from what is resident now, where the kernel allows it (Linux)."""
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")


def resident_bytes() -> int:
    """Resident bytes of this process; 0 where the kernel does not say."""
    return _status_bytes("VmRSS") or 0


def peak_bytes() -> int:
    """The most bytes resident since ``reset_peak``, or since the process began."""
    found = _status_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if found is None else found


def _status_bytes(field: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None
