"""Time comes in by argument: the only module that reads a clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary start; never goes back."""

    def now(self) -> float:
        """Seconds, monotonic."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds, monotonic."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told, for tests and simulation."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Seconds, as last set."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` (not negative)."""
        if seconds < 0:
            raise ValueError("a clock never goes back")
        self._now += seconds
