"""What may befall the steps of a scripted worker, and what it holds of a sequence."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from workers.messages import DraftAheadRequest, ProposeRequest, SamplingParams, VerifyRequest

StepRequest: TypeAlias = ProposeRequest | DraftAheadRequest | VerifyRequest


class Trouble(Enum):
    """What may befall a worker's step."""

    DEATH = "the process is gone, and its state with it"
    TIMEOUT = "the step is done, and the answer comes too late"
    ERROR = "the step raises"
    FORGET = "the worker has lost its sequences"
    STALE = "an answer of an older epoch arrives, with tokens of then"


@dataclass
class HeldSequence:
    """What a worker's KV holds of a sequence."""

    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)  # of them, what was found when the last step began


@dataclass(frozen=True)
class Poison:
    """Troubles all steps that read position `position` of a sequence whose first token is `first_token`."""

    first_token: int
    position: int = 0
    trouble: Trouble = Trouble.DEATH

    def is_in(self, message: StepRequest, held: Mapping[int, HeldSequence]) -> bool:
        """Whether the step does that."""
        for item in message.items:
            known = held.get(item.sequence_id)
            first = item.committed[0] if item.first_position == 0 else known.tokens[0] if known else None
            if first == self.first_token and item.first_position + len(item.committed) > self.position:
                return True
        return False
