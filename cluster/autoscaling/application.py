"""One decision for the whole application: pools are sized together, drafters in proportion to targets."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.autoscaling.damping import Damping
from cluster.autoscaling.drafters import DrafterState, scale_drafters
from cluster.autoscaling.ingress import scale_ingress
from cluster.autoscaling.settings import DrafterSettings, IngressSettings, TargetSettings
from cluster.autoscaling.snapshot import ServiceSnapshot
from cluster.autoscaling.targets import TargetState, scale_targets


@dataclass(frozen=True, slots=True)
class ApplicationSettings:
    """The pools that scale; those that are left out keep the replicas they have."""

    targets: TargetSettings | None = None
    drafters: Mapping[str, DrafterSettings] = field(default_factory=dict)
    ingress: IngressSettings | None = None


@dataclass(frozen=True, slots=True)
class ApplicationState:
    """What the policies remember from one decision to the next."""

    targets: TargetState = field(default_factory=TargetState)
    drafters: Mapping[str, DrafterState] = field(default_factory=dict)
    ingress: Damping = field(default_factory=Damping)


@dataclass(frozen=True, slots=True)
class Decisions:
    """Replicas to ask for, of each pool."""

    targets: int
    drafters: Mapping[str, int]
    ingress: int


def decide(
    settings: ApplicationSettings, state: ApplicationState, snapshot: ServiceSnapshot
) -> tuple[ApplicationState, Decisions]:
    """Return the new state and the replicas of every pool.

    Drafters are bounded by the targets that serve: those that start do not need any yet, those that go no longer do.
    """
    target_state, targets = state.targets, snapshot.targets.wanted
    if settings.targets is not None:
        target_state, targets = scale_targets(settings.targets, target_state, snapshot)
    serving = max(1, min(targets, snapshot.targets.warm))
    drafter_states, drafters = dict(state.drafters), {name: each.wanted for name, each in snapshot.drafters.items()}
    for name, each in settings.drafters.items():
        known = drafter_states.get(name, DrafterState())
        drafter_states[name], drafters[name] = scale_drafters(each, known, snapshot, name, serving)
    ingress_state, ingress = state.ingress, snapshot.ingress.wanted
    if settings.ingress is not None:
        ingress_state, ingress = scale_ingress(settings.ingress, ingress_state, snapshot)
    return ApplicationState(target_state, drafter_states, ingress_state), Decisions(targets, drafters, ingress)
