"""What trees ask of a verification beyond chains: draws with the history of each path, and the path's KV."""

from collections.abc import Iterable, Mapping

from workers.decoding.sampling import INVALID_TOKEN, PositionRun
from workers.decoding.verification import verify_tree
from workers.engine.followed import FollowedSequences
from workers.engine.step import AcceptedPath
from workers.messages import TokenIds, VerifyItem


def runs_of(followed: FollowedSequences, item: VerifyItem) -> list[PositionRun]:
    """Return the positions to draw for a verification that has been read; see `FollowedSequences.run`."""
    first = item.first_position + len(item.committed)
    if item.sample and item.proposal.parents is not None:
        return followed.tree_runs(item.sequence_id, first, item.proposal)
    return [followed.run(item.sequence_id, first, len(item.proposal) + 1 if item.sample else 0)]


def accepted_paths(items: Iterable[VerifyItem], drawn: Mapping[int, TokenIds]) -> list[AcceptedPath]:
    """Return the paths to keep of the trees among `items`; `drawn` holds the draws by sequence id.

    A sequence whose walk ends at a draw that is none keeps nothing: it cannot go on.
    """
    paths = []
    for item in items:
        tree = item.proposal
        if tree.parents is None or not item.sample:
            continue
        outcome = verify_tree(drawn[item.sequence_id], tree.token_ids, tree.parents)
        if INVALID_TOKEN not in outcome.token_ids:
            first = item.first_position + len(item.committed)
            paths.append(AcceptedPath(item.sequence_id, first, outcome.nodes))
    return paths
