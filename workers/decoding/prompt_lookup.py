"""Drafts without a model: what stood behind the last tokens of a sequence when they last occurred in it.

Saxena 2023, "Prompt lookup decoding" (github.com/apoorvumang/prompt-lookup-decoding). Text that is edited, quoted or
summed up repeats itself for long stretches.
"""

import numpy as np

from workers.messages import NO_TOKENS, TokenIds

# Fewer tokens than this recur by chance; to compare more changes hardly any choice.
SHORTEST_MATCH = 2
LONGEST_MATCH = 8
# Places to compare any further: in text that says the same over and over again there could be thousands.
_PLACES = 256


def look_up(tokens: TokenIds, most: int) -> TokenIds:
    """Return the `most` tokens, int32 [m], that followed the longest suffix of `tokens` int32 [n] earlier on.

    Of several such places the latest one counts. What follows it may reach the end: then it goes on from there as it
    began, as text with that period does. Nothing is returned where fewer than `SHORTEST_MATCH` tokens recur; suffixes
    are compared up to `LONGEST_MATCH`, at the latest `_PLACES` places.
    """
    count = len(tokens)
    if most < 1 or count <= SHORTEST_MATCH:
        return NO_TOKENS
    recurs = np.ones(count - SHORTEST_MATCH, dtype=bool)
    for back in range(1, SHORTEST_MATCH + 1):
        recurs &= tokens[SHORTEST_MATCH - back : count - back] == tokens[count - back]
    # Indices of the tokens behind each place.
    behind = np.flatnonzero(recurs)[-_PLACES:] + SHORTEST_MATCH
    for matched in range(SHORTEST_MATCH, LONGEST_MATCH):
        candidates = behind[behind > matched]
        longer = candidates[tokens[candidates - matched - 1] == tokens[count - matched - 1]]
        if not len(longer):
            break
        behind = longer
    if not len(behind):
        return NO_TOKENS
    start = int(behind[-1])
    return tokens[start + np.arange(most) % (count - start)]
