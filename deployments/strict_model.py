"""The base of all models of request fields."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """No unknown fields, no conversion between types (an integer is a valid float)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
