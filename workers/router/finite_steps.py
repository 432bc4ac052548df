"""Noticing a target whose every logit is not a number: its requests fail one by one until it is replaced. Pure."""

from collections.abc import Iterable

from workers.messages import VerifiedItem
from workers.router.rounds import PlannedSequence

MOST_FAULTY_STEPS = 3


class FiniteSteps:
    """Counts the steps in a row in which no sequence could go on, though nothing in their requests forbade it.

    One bad sequence ends alone and says nothing about its target, nor does one whose own rules may ban every token.
    """

    def __init__(self) -> None:
        self._faulty_in_a_row = 0

    @property
    def have_ceased(self) -> bool:
        """Whether the target is of no use any more."""
        return self._faulty_in_a_row >= MOST_FAULTY_STEPS

    def observe(self, planned: Iterable[PlannedSequence], answers: Iterable[VerifiedItem]) -> None:
        """Note the answers of one step, which are in the order of `planned`."""
        faulty = False
        for plan, verified in zip(planned, answers, strict=True):
            if verified.fault is None and len(verified.token_ids):
                self._faulty_in_a_row = 0
                return
            faulty |= verified.fault is not None and plan.sequence.request.sampling.rules is None
        self._faulty_in_a_row += faulty
