"""Why a request can never be served: said at submit, before anything is held for it."""

from memkv_pp.admission.ledger import Ledger
from memkv_pp.errors import StageShortfall
from memkv_pp.units import format_size
from memkv_pp.wire import Refuse, Request

_MEND = (
    "lower --max-new, give the binding stage more bytes, move the fence, or choose smaller formats"
)


def refusal_of(
    request: Request, rows: int, ledger: Ledger, *, context_tokens: int, vocabulary_size: int
) -> Refuse | None:
    """The refusal of a request that can hold ``rows``, or None if an empty pipeline can serve it.

    ``context_tokens`` and ``vocabulary_size`` are 0 where there is no such limit.
    """
    which = request.request
    if not request.prompt:
        return Refuse(which, "empty_prompt", "the prompt has no tokens", "give it some text")
    if min(request.prompt) < 0 or (vocabulary_size and max(request.prompt) >= vocabulary_size):
        return Refuse(which, "token", f"a prompt token is not in [0, {vocabulary_size})")
    if request.max_new < 1:
        return Refuse(which, "max_new", f"--max-new: {request.max_new} is below 1")
    if context_tokens and rows > context_tokens:
        return Refuse(
            which,
            "context",
            f"prompt of {len(request.prompt)} + {request.max_new} new tokens need {rows} rows,"
            f" the context holds {context_tokens}",
            "shorten the prompt, lower --max-new or raise --ctx",
        )
    short = ledger.never_fits(rows)
    if short:
        return Refuse(which, "capacity", describe_shortfall(rows, short), _MEND, short)
    return None


def describe_shortfall(rows: int, stages: tuple[StageShortfall, ...]) -> str:
    """A sentence with every stage's have and need."""
    parts = "; ".join(
        f"stage {s.stage} has {s.have_bytes} ({format_size(s.have_bytes)}), needs {s.need_bytes}"
        f" ({format_size(s.need_bytes)})"
        for s in stages
    )
    return f"{rows} rows do not fit: {parts}"
