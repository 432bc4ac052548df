"""Which nodes a worker may run on: Ray's label selectors, checked before Ray sees them."""

import re
from typing import Annotated

from pydantic import AfterValidator

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"(?:{_NAME}(?:\.{_NAME})*/)?{_NAME}")
_SELECTOR = re.compile(rf"!?{_NAME}|!?in\({_NAME}(?:, ?{_NAME})*\)")


def _checked(labels: dict[str, str]) -> dict[str, str]:
    for key, selector in labels.items():
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not the name of a node label")
        if not _SELECTOR.fullmatch(selector):
            raise ValueError(f"{key}: {selector!r} is none of value, !value, in(a, b), !in(a, b)")
    return labels


# By label, what its value must be. `!` also takes nodes that do not have the label.
NodeLabels = Annotated[dict[str, str], AfterValidator(_checked)]
