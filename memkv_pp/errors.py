"""Every error a caller may meet.

::

    MemkvError
    ├── ConfigError (ValueError)   the user's numbers cannot work; says which knob
    │   ├── FenceError             a cut list that does not cover the layers, or parts what must stay together
    │   ├── FormatError            an unknown format, or a head size a format cannot hold
    │   ├── GeometryError          metadata that describes no model
    │   └── ModelError             a model file that cannot be loaded
    ├── CapacityError              wanted, available, on which stages
    │   ├── OutOfRecords           a pool of records is empty
    │   └── OutOfSlots             a pool of state slots is empty
    ├── NotResident                rows that were overwritten, or states that would have to go back
    ├── StageError                 names the stage
    │   ├── StageLost              the outside broke it: a dead or silent process
    │   ├── StageClosed            you closed it
    │   ├── NoTokenError           a sequence's logits are NaN: there is no token to draw
    │   ├── PlanOrderError         a plan came twice, late, or with a gap before it
    │   └── DigestMismatch         a stage's books differ from the ledger's
    └── InternalError              our bug; state may be void
        └── DoubleRelease          an id was given back that nobody held

A refusal is not an error: the coordinator answers with a ``Refuse`` command. Every class
survives pickling with its fields, because Ray pickles what an actor raises.
"""

from dataclasses import dataclass


class MemkvError(Exception):
    """The root of the tree; ``hint`` says what to do, and may be empty."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(MemkvError, ValueError):
    """The user's numbers cannot work. The message names the knob and the numbers."""


class FenceError(ConfigError):
    """A cut list that is not complete, disjoint and in order, or that parts a shared layer from its source."""


class FormatError(ConfigError):
    """An unknown cache format, or a head size that the format cannot hold."""


class GeometryError(ConfigError):
    """Metadata that is damaged, hostile, or describes no model."""


class ModelError(ConfigError):
    """A model file whose weights cannot be loaded, or a family without an adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShortfall:
    """What one stage has and what was asked of it, in bytes."""

    stage: int
    have_bytes: int
    need_bytes: int


class CapacityError(MemkvError):
    """More was asked than there is; ``stages`` holds every stage's have and need."""

    def __init__(
        self, message: str, hint: str = "", stages: tuple[StageShortfall, ...] = ()
    ) -> None:
        super().__init__(message, hint)
        self.args = (message, hint, stages)
        self.stages = stages


class OutOfRecords(CapacityError):
    """A pool of records holds fewer free ids than were asked for. Nothing was taken."""


class OutOfSlots(CapacityError):
    """A pool of state slots holds fewer free ids than were asked for. Nothing was taken."""


class NotResident(MemkvError):
    """Rows or states were asked for that are overwritten, or would have to be. Nothing changed."""


class StageError(MemkvError):
    """Something went wrong on one stage."""

    def __init__(self, message: str, hint: str = "", stage: int = -1) -> None:
        super().__init__(message, hint)
        self.args = (message, hint, stage)
        self.stage = stage


class StageLost(StageError):
    """The outside broke the stage: its process died, stopped, or fell silent."""


class StageClosed(StageError):
    """The stage was closed by its owner; it takes no more plans."""


class NoTokenError(StageError):
    """The logits of a sequence are NaN, so no token can be drawn; the others go on."""


class PlanOrderError(StageError):
    """A plan arrived out of its order: repeated, late, or after a gap. It was not applied."""


class DigestMismatch(StageError):
    """A stage's lengths or bytes differ from what the coordinator's ledger expects."""


class InternalError(MemkvError):
    """Our bug: books that do not balance. State may be void."""


class DoubleRelease(InternalError):
    """An id was given back that nobody held. It was refused and counted; nothing changed."""
