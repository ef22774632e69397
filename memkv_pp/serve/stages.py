"""What a backend gives the session: running stages, and a port to them."""

from typing import Protocol

from memkv_pp.admission.ports import StagePort
from memkv_pp.stage.runtime import StageStatistics


class Stages(Protocol):
    """The stages of one pipeline, however they run."""

    async def open(self) -> StagePort:
        """Start every stage; they announce themselves on the port once they have loaded."""
        ...

    def pids(self) -> tuple[int, ...]:
        """The process of each stage."""
        ...

    async def statistics(self) -> tuple[StageStatistics, ...]:
        """Every stage's own account, after its own ``check``; only while no plan is in flight."""
        ...

    async def close(self) -> None:
        """End every stage and free its memory; may be called twice."""
        ...
