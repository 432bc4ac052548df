"""The joint distribution of three tokens in a row against exact enumeration, in many more draws than the tests take.

`make bench BENCH=distribution` draws a million continuations per way of verification without options, and 100,000 with
each option (about half an hour); `QUICK=1` a tenth of it. Real drafter, verifier and messages; both models are tables
over a vocabulary of three. A right build's p-values are uniform; each row names the smallest p-value it may have.
"""

import argparse

from scipy import stats

from benchmarks.harness import Row, report
from tests.decoding.goodness import FITS, chi_square_p
from tests.engine.joint import draw_continuations, expected_joint
from tests.engine.test_joint import DRAFTER, SAMPLINGS, TARGET
from workers.messages import Verification


def main() -> None:
    """Run the benchmark; exits with 1 if a distribution does not fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    scale = 10 if parser.parse_args().quick else 1
    rows = []
    for name, sampling in SAMPLINGS.items():
        draws = (1_000_000 if name == "plain" else 100_000) // scale
        expected = expected_joint(TARGET, sampling)
        for verification in Verification:
            drawn = draw_continuations(TARGET, DRAFTER, sampling, verification, range(draws))
            case = f"{name}, {verification}, {draws:,} draws"
            possible = expected > 0
            g_test = stats.power_divergence(
                drawn.counts[possible], expected[possible] * draws, lambda_="log-likelihood"
            )
            rows.append(Row(f"{case}: chi-square test", chi_square_p(drawn.counts, expected), "p", bound=FITS))
            rows.append(Row(f"{case}: G-test", float(g_test.pvalue), "p", bound=FITS))
            rows.append(Row(f"{case}: first drafts accepted", 1 - drawn.accepted[0] / draws, "share"))
            print(rows[-3].case, f"p = {rows[-3].value:.4f}", flush=True)
    report("distribution", rows)
    if any(row.unit == "p" and row.value <= FITS for row in rows):
        raise SystemExit("a distribution does not fit")


if __name__ == "__main__":
    main()
