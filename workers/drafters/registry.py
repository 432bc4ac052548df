"""Which kinds of drafter there are. A new kind is one new module and one line here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from workers.drafters.base import Drafter
from workers.engine.config import EngineConfig

DrafterKind = Literal["model"]


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """How to make one drafter; `engine` is what a drafter with a model of its own runs on."""

    kind: DrafterKind
    engine: EngineConfig


def _model_drafter(spec: DrafterSpec) -> Drafter:
    # Imported in the worker's process only: the router and the supervisors do without torch.
    from workers.drafters.model_drafter import ModelDrafter
    from workers.engine.auto_quantization import load_drafter

    return ModelDrafter(load_drafter(spec.engine))


_BUILDERS: dict[DrafterKind, Callable[[DrafterSpec], Drafter]] = {"model": _model_drafter}


def build_drafter(spec: DrafterSpec) -> Drafter:
    """Load the drafter that `spec` describes. Raises ConfigurationError when its model cannot be used."""
    return _BUILDERS[spec.kind](spec)
