"""Branches drafted ahead: sequences that begin as another one does and share its KV until the outcome is known."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from workers.drafters.forecasts import Forecast, Outcome
from workers.engine.followed import FollowedSequences
from workers.messages import TokenIds


@dataclass(slots=True)
class Fork:
    """A branch: under `fork_id` its sequence goes on with the outcome's token at `position`, and `forecast` behind."""

    fork_id: int
    outcome: Outcome
    position: int
    forecast: Forecast | None = None


class Forks:
    """The forks of each sequence. They are known to nobody else, and live until the next message about the sequence."""

    def __init__(self, followed: FollowedSequences) -> None:
        self._followed = followed
        self._forks: dict[int, list[Fork]] = {}
        self._ids = itertools.count(-1, -1)

    def grow(self, sequence_id: int, base: int, outcome: Outcome) -> Fork:
        """Fork the sequence, whose drafts begin at `base`, where the outcome parts from them. The token is not read."""
        fork = Fork(next(self._ids), outcome, base + outcome.accepted)
        self._followed.fork(sequence_id, fork.fork_id, fork.position)
        self._forks.setdefault(sequence_id, []).append(fork)
        return fork

    def resolve(self, sequence_id: int, first_position: int, tokens: TokenIds) -> Forecast | None:
        """Let the sequence be the fork that came true, if one did, and drop the others.

        `tokens` int32 [n] were committed from `first_position` on. Returns what that fork expects.
        """
        forks = self._forks.pop(sequence_id, [])
        came_true = next((fork for fork in forks if self._begins_with(fork, first_position, tokens)), None)
        if came_true is not None:
            self._followed.adopt(sequence_id, came_true.fork_id)
        self._followed.release([fork.fork_id for fork in forks if fork is not came_true])
        return None if came_true is None else came_true.forecast

    def drop(self, sequence_ids: Iterable[int] | None = None) -> bool:
        """Drop the forks of these sequences, None for all; return whether there were any."""
        owners = list(self._forks) if sequence_ids is None else sequence_ids
        dropped = [fork.fork_id for owner in owners for fork in self._forks.pop(owner, ())]
        self._followed.release(dropped)
        return bool(dropped)

    def _begins_with(self, fork: Fork, first_position: int, tokens: TokenIds) -> bool:
        """Whether what was committed leads to the fork. Before `first_position` it is like its sequence anyway."""
        drafts = fork.position - first_position
        if fork.forecast is None or not 0 <= drafts < len(tokens) or tokens[drafts] != fork.outcome.token:
            return False
        read = self._followed.tokens(fork.fork_id, first_position, fork.position)
        return bool((read == tokens[:drafts]).all())
