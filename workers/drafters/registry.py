"""Which kinds of drafter there are. A new kind is one new module and one line here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from workers.drafters.base import Drafter
from workers.emulated.stretched import stretched_drafter
from workers.emulated.timing import DrafterTiming
from workers.engine.config import EngineConfig

DrafterKind = Literal["model"]


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """How to make one drafter; `engine` is what a drafter with a model of its own runs on.

    With `emulated` it takes another device's time.
    """

    kind: DrafterKind
    engine: EngineConfig
    emulated: DrafterTiming | None = None


def _model_drafter(spec: DrafterSpec) -> Drafter:
    # Imported in the worker's process only: the router and the supervisors do without torch.
    from workers.drafters.model_drafter import ModelDrafter
    from workers.engine.auto_quantization import load_drafter

    return ModelDrafter(load_drafter(spec.engine))


_BUILDERS: dict[DrafterKind, Callable[[DrafterSpec], Drafter]] = {"model": _model_drafter}


def build_drafter(spec: DrafterSpec) -> Drafter:
    """Load the drafter that `spec` describes. Raises ConfigurationError when its model cannot be used."""
    return stretched_drafter(_BUILDERS[spec.kind](spec), spec.emulated)
