"""The base of all models of request fields."""

from collections.abc import Mapping
from typing import ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict

NeutralValues: TypeAlias = Mapping[str, tuple[object, ...]]
"""Options that are not honoured, with the values that ask for nothing. Null always is one."""


class StrictModel(BaseModel):
    """No unknown fields, no conversion between types (an integer is a valid float)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class RequestBody(StrictModel):
    """The body of a request, and the options that it may only have where they ask for nothing."""

    neutral_only: ClassVar[NeutralValues] = {}
