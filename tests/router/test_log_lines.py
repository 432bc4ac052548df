"""What goes wrong in every round does not bury the log."""

import logging

import pytest

from workers.log_lines import FewOfAKind


def test_of_the_same_message_a_few_get_through_and_the_next_period_tells_how_many_did_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    logger = logging.getLogger("tests.few_of_a_kind")
    logger.addFilter(FewOfAKind(most=2, period_s=60.0, clock=lambda: now_s))
    for _ in range(5):
        logger.warning("%s fails", "a drafter")
    logger.warning("%s fails", "another")
    now_s = 61.0
    logger.warning("%s fails", "a drafter")
    logger.warning("%s fails", "a drafter")

    often = "a drafter fails"
    assert caplog.messages == [often, often, "another fails", f"{often} (3 more like it were left out)", often]
