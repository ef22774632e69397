"""How much a request is charged when it enters, and in which order requests are tried."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from memkv_pp.wire import Request


class Policy(Protocol):
    """A decision in values: it holds no state of its own."""

    def rows(self, request: Request) -> int:
        """Rows to charge on every stage when ``request`` is admitted."""
        ...

    def candidates(self, waiting: Iterable[Request]) -> Iterator[Request]:
        """Waiting requests in the order they are tried; trying stops at the first that is short."""
        ...


class ReservePolicy:
    """The worst case up front, first come first served: an admitted request never runs short.

    Rows: prompt + max_new - 1 (the last token drawn is not fed), + ``spec_tokens`` while
    speculating.
    """

    def __init__(self, spec_tokens: int = 0) -> None:
        self._spec_tokens = spec_tokens

    def rows(self, request: Request) -> int:
        """The most rows the request can ever hold."""
        return len(request.prompt) + request.max_new - 1 + self._spec_tokens

    def candidates(self, waiting: Iterable[Request]) -> Iterator[Request]:
        """In order of arrival."""
        return iter(waiting)
