"""Window rings as arithmetic: how many rows, which are resident, how far back one may go.

Positions are absolute token indices; half-open ranges throughout::

      0            first                     length
      |  overwritten  |  resident rows  ...    |
                      [first, length)

The paged ring of this module drops whole blocks and copies nothing. The formulas are
``dual-cache-and-pipeline.md`` 1.7 with our chunk and slack.
"""

from memkv_pp.units import align_up

ALIGNMENT_ROWS = 32


def ring_rows(
    window: int, *, chunk: int, slack: int, block_tokens: int = 1, alignment: int = ALIGNMENT_ROWS
) -> int:
    """Physical rows of one sequence's ring: ``window + chunk + slack + alignment - 1``.

    ``block_tokens`` above 1 rounds up to whole blocks (the paged layout). ``alignment`` is at least
    a block: the oldest block goes as a whole, so up to that many rows go too early.

    >>> ring_rows(512, chunk=512, slack=64), ring_rows(512, chunk=512, slack=64, block_tokens=16)
    (1119, 1120)
    """
    return align_up(window + chunk + slack + alignment - 1, block_tokens)


def resident_rows(tokens: int, rows: int) -> int:
    """Rows that a sequence of ``tokens`` takes in a ring of ``rows``."""
    return min(tokens, rows)


def view_start(length: int, window: int) -> int:
    """The first position that the token at ``length`` may look at, aligned down.

    At most ``ALIGNMENT_ROWS - 1`` masked rows precede the live window.
    """
    return max(length - (window - 1), 0) // ALIGNMENT_ROWS * ALIGNMENT_ROWS


def can_rewind_to(length: int, *, window: int, first_resident: int) -> bool:
    """Whether a ring whose oldest row is ``first_resident`` can go back to ``length`` tokens.

    A predicate, never a clamp: a view that is not wholly resident is not granted.
    """
    return view_start(length, window) >= first_resident
