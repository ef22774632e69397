"""A window ring kept flat: one plane of rows, in which a full ring moves what it keeps to the front.

This is the source's ring (``dual-cache-and-pipeline.md`` 1.7) as arithmetic, for those who hand caches
to it or take them from it, and the oracle of the paged ring, which copies nothing. Positions are
absolute token indices; physical row ``r`` holds position ``base + r``::

     base               length        base + rows
      |  resident rows    |    free    |
"""

from dataclasses import dataclass

from memkv_pp.errors import GeometryError, NotResident
from memkv_pp.rings import ALIGNMENT_ROWS, can_rewind_to, view_start

REWIND_SLACK_ROWS = 512


@dataclass(frozen=True, slots=True)
class Contiguous:
    """The new rows go to ``write_row`` and behind; nothing moves."""

    write_row: int


@dataclass(frozen=True, slots=True)
class Rebase:
    """Rows ``[src_row, src_row + keep_rows)`` move to row 0, then the new rows go behind them.

    The ranges may overlap. ``new_base`` is the position of row 0 afterwards.
    """

    src_row: int
    keep_rows: int
    new_base: int
    write_row: int


class FlatRing:
    """``rows`` physical rows of a layer that sees ``window``; GeometryError if one is not positive."""

    def __init__(self, rows: int, window: int, base: int = 0) -> None:
        if rows <= 0 or window <= 0:
            raise GeometryError(f"a ring of {rows} rows for a window of {window}")
        self.rows = rows
        self.window = window
        self.base = base

    def append_plan(self, length: int, retain_from: int, num_rows: int) -> Contiguous | Rebase:
        """Where ``num_rows`` after ``length`` go; rows before ``retain_from`` may be dropped.

        NotResident when a row to be retained is gone already, which is looked at first, or when what
        is kept and the new rows do not fit.
        """
        base = self.base
        if not base <= retain_from <= length:
            raise NotResident(
                f"ring: rows were lapped: base {base}, retain from {retain_from}, length {length}"
            )
        used = length - base
        if used > self.rows:
            raise NotResident(f"ring: {used} rows in use of {self.rows}")
        if used + num_rows <= self.rows:
            return Contiguous(used % self.rows)
        keep = length - retain_from
        if keep + num_rows > self.rows:
            raise NotResident(
                f"ring: {keep} rows to keep and {num_rows} new ones do not fit {self.rows}"
            )
        return Rebase(retain_from - base, keep, retain_from, keep)

    def apply_rebase(self, base: int) -> None:
        """Row 0 holds position ``base`` from now on; NotResident if that goes back."""
        if base < self.base:
            raise NotResident(f"ring: base {self.base} cannot go back to {base}")
        self.base = base

    def physical_range(self, start: int, end: int) -> range:
        """The rows of positions ``[start, end)``; NotResident unless all of them may be there."""
        if start < self.base or end < start or end - self.base > self.rows:
            raise NotResident(
                f"ring: view [{start}, {end}) is outside resident [{self.base},"
                f" {self.base + self.rows})"
            )
        first = (start - self.base) % self.rows
        return range(first, first + end - start)

    def can_rewind_to(self, length: int) -> bool:
        """Whether the view of the token at ``length`` is still whole."""
        return can_rewind_to(length, window=self.window, first_resident=self.base)

    def restore_plan(self, length: int) -> tuple[int, range]:
        """(base of a fresh ring, rows of this one to copy to its front) for a sequence of ``length``.

        The live window alone: never ``length`` rows. NotResident if it is gone.
        """
        base = view_start(length, self.window)
        return base, self.physical_range(base, length)


def retain_from(first_row: int, window: int, base: int, *, slack: int = REWIND_SLACK_ROWS) -> int:
    """What an append at ``first_row`` keeps: its view, and ``slack`` rows more where there are any.

    Slack is granted, never demanded: no row before ``base`` is asked for.
    """
    wanted = max(max(first_row - (window - 1), 0) - slack, 0)
    return max(base, wanted // ALIGNMENT_ROWS * ALIGNMENT_ROWS)


def retain_in_blocks(length: int, num_rows: int, rows: int, block: int, base: int) -> int:
    """What an append keeps in a ring of whole blocks that drops as few of them as it must.

    With it a flat ring of ``rows``, a multiple of ``block``, holds at any time just the rows that the
    paged ring of ``rows / block`` records does.
    """
    overflow = max(length + num_rows - rows, 0)
    return max(base, -(-overflow // block) * block)
