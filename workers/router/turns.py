"""Whose turn it is at a target: cohorts side by side, and sequences that have to run alone in between. Pure."""

from collections.abc import Mapping

from workers.router.running import RunningSequence

ALONE = -1
"""The number of the round of a sequence that has to run alone; those of cohorts are 0 and above."""


class Turns:
    """The rounds under way of one target, and who takes part in the next ones.

    A sequence that may have ended a target has rounds to itself, in which nothing else is under way there. Such rounds
    and those of all others take turns, so that neither waits for long.
    """

    def __init__(self, max_batch_sequences: int) -> None:
        self._max_batch_sequences = max_batch_sequences
        self._under_way: dict[int, set[int]] = {}
        self._alone_is_next = True

    @property
    def is_single(self) -> bool:
        """Whether one round is under way, and no other."""
        return len(self._under_way) == 1

    def waiting(self, running: Mapping[int, RunningSequence]) -> list[RunningSequence]:
        """Return the sequences that are in no round, those that waited longest first."""
        busy = set[int]().union(*self._under_way.values())
        return [each for sequence_id, each in running.items() if sequence_id not in busy]

    def next_rounds(
        self, running: dict[int, RunningSequence], cohorts: Mapping[int, int]
    ) -> dict[int, list[RunningSequence]]:
        """Return the rounds to begin now, by their number; they count as under way until `ended`.

        Those who take part go to the end of `running`.
        """
        if ALONE in self._under_way:
            return {}
        idle = self.waiting(running)
        isolated = [each for each in idle if each.sequence.target.suspicion.is_isolated]
        others = [each for each in idle if not each.sequence.target.suspicion.is_isolated]
        if isolated and (self._alone_is_next or not (others or self._under_way)):
            # What is under way has to end first.
            rounds = {} if self._under_way else {ALONE: isolated[:1]}
        else:
            rounds = self._of_cohorts(others, cohorts)
        for number, members in rounds.items():
            self._alone_is_next = number != ALONE
            self._under_way[number] = {each.sequence.sequence_id for each in members}
            for each in members:
                running[each.sequence.sequence_id] = running.pop(each.sequence.sequence_id)
        return rounds

    def ended(self, number: int) -> None:
        """Note that a round is over."""
        del self._under_way[number]

    def _of_cohorts(
        self, waiting: list[RunningSequence], cohorts: Mapping[int, int]
    ) -> dict[int, list[RunningSequence]]:
        """A round for each cohort that has none; of more sequences than fit, those that waited longest, checks last."""
        rounds: dict[int, list[RunningSequence]] = {}
        for each in sorted(waiting, key=lambda running: running.is_check):
            members = rounds.setdefault(cohorts[each.sequence.sequence_id], [])
            if len(members) < self._max_batch_sequences:
                members.append(each)
        return {number: members for number, members in rounds.items() if number not in self._under_way}
