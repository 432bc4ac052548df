"""The tests of losslessness can fail: each of these changes to the rules of acceptance makes one of them do so."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.decoding.test_ratio import check_edges
from tests.engine.test_joint import SAMPLINGS, check_greedy, check_joint
from tests.mutants import Mutant
from workers.decoding import logit_rules, ratio, verification
from workers.drafters import chains
from workers.messages import Verification

BY_RATIO = partial(check_joint, SAMPLINGS["plain"], Verification.RATIO)
WITH_PENALTIES = partial(check_joint, SAMPLINGS["penalties"], Verification.COUPLED)
COUNTS = "_growing_counts(slots[self.prompt_tokens - start :], len(positions), len(ids))"
MUTANTS: dict[str, tuple[Mutant, Callable[[], None]]] = {
    "accept with q / p instead of p / q": (Mutant(ratio, "uniforms * q < p", "uniforms * p < q"), BY_RATIO),
    "accept an impossible draft at u = 0": (Mutant(ratio, "uniforms * q < p", "uniforms * q <= p"), check_edges),
    "forget the bonus": (
        Mutant(ratio, "np.append(chain.drafts[:kept], token)", "np.append(chain.drafts, token)[: max(1, kept)]"),
        BY_RATIO,
    ),
    "accept with the noise that drew the draft": (
        Mutant(ratio, "positions, Stream.ACCEPT)", "positions, Stream.DRAFT)"),
        BY_RATIO,
    ),
    "draw corrections with the noise that drew the draft": (
        Mutant(chains, "stream=Stream.DRAFT", "stream=Stream.DRAW"),
        partial(check_joint, SAMPLINGS["top_p"], Verification.RATIO),
    ),
    "a residual of a p that is not normalised": (
        Mutant(ratio, "scores[last_rows] - normalisers[last_rows].unsqueeze(-1)", "scores[last_rows]"),
        BY_RATIO,
    ),
    "draw the correction from p": (Mutant(ratio, "kept < len(chain.drafts)", "kept < 0"), BY_RATIO),
    "a residual with both signs": (Mutant(ratio, ".clamp_(min=0)", ".abs_()"), BY_RATIO),
    "penalties that do not see the drafts before": (
        Mutant(logit_rules, COUNTS, f"np.repeat({COUNTS}[:1], len(positions), axis=0)"),
        WITH_PENALTIES,
    ),
    "penalties on the bonus only": (
        Mutant(
            logit_rules,
            "        return Penalties(ids, divisors, subtrahends)",
            "        divisors[:-1], subtrahends[:-1] = 1, 0\n        return Penalties(ids, divisors, subtrahends)",
        ),
        WITH_PENALTIES,
    ),
    "coupled: keep one draft too many": (
        Mutant(
            verification,
            "int(mismatches[0]) if len(mismatches)",
            "min(int(mismatches[0]) + 1, len(drafts)) if len(mismatches)",
        ),
        partial(check_greedy, 0.0, (2, 1)),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, check = MUTANTS[name]
    mutant.install(monkeypatch)
    with pytest.raises(AssertionError):
        check()
