"""The coordinator's memory of an admitted request and of a plan in flight."""

from dataclasses import dataclass, field

from memkv_pp.wire import Plan, PoolBytes, Request, StepDone


@dataclass(slots=True)
class LiveSequence:
    """An admitted request: which rows have been planned, and which token comes next.

    ::

        prompt | drawn tokens
        [0, rows_planned)      in plans so far (their rows are cached once those plans are done)
    """

    request: Request
    rows_planned: int = 0
    num_drawn: int = 0
    next_token: int | None = None

    @property
    def rows_ready(self) -> int:
        """Rows that could go into the next plan: the rest of the prompt, or one drawn token."""
        remaining = len(self.request.prompt) - self.rows_planned
        return remaining if remaining > 0 else int(self.next_token is not None)

    def take(self, count: int) -> tuple[int, ...]:
        """The input ids of the next ``count`` rows, which are planned from now on."""
        start = self.rows_planned
        if start < len(self.request.prompt):
            tokens = self.request.prompt[start : start + count]
        else:
            assert self.next_token is not None
            tokens = (self.next_token,)
            self.next_token = None
        self.rows_planned += len(tokens)
        return tokens

    @property
    def samples(self) -> bool:
        """Whether the last planned row is one a token is drawn after."""
        return self.rows_planned >= len(self.request.prompt)


@dataclass(slots=True)
class FlyingPlan:
    """A plan that was sent, the digests it must bring, and the stages still to answer."""

    plan: Plan
    lengths: tuple[int, ...]
    used: tuple[PoolBytes, ...]
    sequences: int
    sent_at: float
    waiting_for: set[int]
    tokens: tuple[int, ...] = ()
    mismatches: dict[int, str] = field(default_factory=dict[int, str])

    def accept(self, done: StepDone, *, check_bytes: bool) -> str:
        """Take a stage's answer; a non-empty answer says how the whole stage's books differ.

        A sequence whose length differs is put into ``mismatches`` instead.
        """
        self.waiting_for.discard(done.stage)
        if len(done.lengths) != len(self.lengths):
            return f"answered for {len(done.lengths)} sequences, {len(self.lengths)} were asked"
        for rows, expected, found in zip(self.plan.rows, self.lengths, done.lengths, strict=True):
            if expected != found:
                self.mismatches[rows.sequence] = (
                    f"stage {done.stage} holds {found} rows of sequence {rows.sequence} after plan"
                    f" {done.plan}, the ledger expects {expected}"
                )
        if done.stage == len(self.used) - 1:
            wanted = sum(rows.sample for rows in self.plan.rows)
            if len(done.tokens) != wanted:
                return f"drew {len(done.tokens)} tokens in plan {done.plan}, {wanted} were asked"
            self.tokens = done.tokens
        if check_bytes and not self.mismatches:
            expected_used = self.used[done.stage]
            if done.used != expected_used or done.sequences != self.sequences:
                return (
                    f"holds {done.used} in {done.sequences} sequences after plan {done.plan},"
                    f" the ledger expects {expected_used} in {self.sequences}"
                )
        return ""
