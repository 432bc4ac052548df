"""A drafter's section as it is after an update: what `user_config` of its deployment changes of it. Pure."""

from typing import Any

from pydantic import ValidationError

from deployments.config import DrafterSection
from workers.errors import ConfigurationError

FIXED = ("name", "replicas", "autoscaling", "num_cpus", "num_gpus", "node_labels")
"""What a replica has been placed and counted by; another value takes another replica."""


def updated_section(section: DrafterSection, user_config: object) -> DrafterSection:
    """Return `section` with the keys of `user_config` in place of its own.

    Raises ConfigurationError, one line that names the key, for unknown keys, impossible values, and keys that only a
    new replica can follow.
    """
    where = f"drafter {section.name}: user_config"
    if not isinstance(user_config, dict):
        raise ConfigurationError(f"{where} must have keys of the drafter's section, not be {user_config!r}")
    for key in user_config:
        if key in FIXED:
            raise ConfigurationError(f"{where}.{key} cannot be changed while the drafter runs; change it in args")
    kept: dict[str, Any] = section.model_dump(exclude_unset=True)
    try:
        return DrafterSection.model_validate(kept | user_config)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        path = ".".join([where, *map(str, problem["loc"])])
        raise ConfigurationError(f"{path}: {problem['msg']}") from error
