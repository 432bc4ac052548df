"""What trees ask of a verification beyond chains: draws with the history of each path, and the path's KV."""

from collections.abc import Iterable, Mapping

from workers.decoding.sampling import INVALID_TOKEN, PositionRun
from workers.decoding.verification import VerifiedProposal, VerifiedTree
from workers.engine.followed import FollowedSequences
from workers.engine.item_rows import ItemRows
from workers.engine.step import AcceptedPath


def runs_of(followed: FollowedSequences, part: ItemRows) -> list[PositionRun]:
    """Return the positions to draw for a verification that has been read; see `FollowedSequences.run`."""
    item = part.item
    if item.proposal.parents is not None:
        return followed.tree_runs(item.sequence_id, part.next_position, item.proposal)
    return [followed.run(item.sequence_id, part.next_position, part.draws)]


def accepted_paths(parts: Iterable[ItemRows], outcomes: Mapping[int, VerifiedProposal]) -> list[AcceptedPath]:
    """Return the paths to keep of the trees among `parts`; `outcomes` are by sequence id.

    A sequence whose walk ends at a draw that is none keeps nothing: it cannot go on.
    """
    paths = []
    for part in parts:
        outcome = outcomes.get(part.item.sequence_id)
        if isinstance(outcome, VerifiedTree) and INVALID_TOKEN not in outcome.token_ids:
            paths.append(AcceptedPath(part.item.sequence_id, part.next_position, outcome.nodes))
    return paths
