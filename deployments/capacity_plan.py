"""From a deployment's configuration to its plan: devices and memory per role, and what speculation should bring."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cluster.accelerators import CATALOGUE, RAY_ACCELERATOR_LABEL, Accelerator, accelerator
from cluster.capacity import (
    LIKELY_HIT,
    CapacityRow,
    PairTimes,
    StepTime,
    capacity_row,
    drafters_for,
    roofline_step,
)
from cluster.errors import PlanError
from cluster.memory_plan import MemoryPlan, WorkerNeed, memory_problems, memory_warnings, plan_memory
from cluster.topology import Node, Placement, Role, is_one_value, place, role_problems, topology_warnings
from deployments.config import DrafterSection, LeadoutConfig, TargetSection, WorkerSection
from deployments.model_shapes import FoundShape, find_shape
from workers.errors import ConfigurationError
from workers.router.acceptance import COLD_RATE

SEQUENCES = (1, 4, 8, 16, 32, 64, 128)
CONTEXT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the configuration does not say. Mappings are by `target` and the drafters' names.

    `acceptance` is the share of drafts accepted, `hit` that of verifications whose outcome was drafted behind;
    `context_tokens` are in the KV of each sequence when it is half-way. Step times are those of one sequence.
    """

    accelerators: Mapping[str, str] = field(default_factory=dict)
    acceptance: float = COLD_RATE
    hit: float = LIKELY_HIT
    target_step_ms: float | None = None
    draft_step_ms: Mapping[str, float] = field(default_factory=dict)
    context_tokens: int = CONTEXT_TOKENS
    nodes: Sequence[Node] = ()


@dataclass(frozen=True, slots=True)
class RolePlan:
    """One section of the configuration: where it runs, what it takes, how long its step is."""

    name: str
    role: Role
    shape: FoundShape
    memory: MemoryPlan
    step: StepTime


@dataclass(frozen=True, slots=True)
class PairPlan:
    """What a drafter should bring, by sequences in a round; all targets keep `needed` drafters busy."""

    drafter: str
    rows: tuple[CapacityRow, ...]
    needed: int
    configured: int


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """The plan. With `problems` the deployment cannot run so; `nodes` pairs replicas with machines that were given."""

    roles: tuple[RolePlan, ...]
    pairs: tuple[PairPlan, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    nodes: tuple[tuple[str, str], ...] = ()

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs of each kind that all replicas occupy."""
        counts: dict[str, int] = {}
        for each in self.roles:
            if each.role.gpus:
                name = each.role.accelerator.name
                counts[name] = counts.get(name, 0) + each.role.gpus
        return counts


def plan_deployment(config: LeadoutConfig, options: PlanOptions) -> DeploymentPlan:
    """Plan `config`, whose models are resolved. Raises ConfigurationError for what cannot even be planned."""
    drafter_names = [section.name for section in config.drafters]
    _check_names("accelerator", options.accelerators, ["target", *drafter_names])
    _check_names("draft-step-ms", options.draft_step_ms, drafter_names)
    target = _role(config, "target", "target", config.target, options)
    drafters = [
        _role(config, section.name, f"drafters[{index}]", section, options)
        for index, section in enumerate(config.drafters)
    ]
    roles = (target, *drafters)
    pairs = [_pair(config, target, drafter, options) for drafter in drafters]
    automatic = [f"drafters[{index}]" for index, each in enumerate(config.drafters) if each.quantization == "auto"]
    placement = _placed(roles, options.nodes)
    problems = [
        line
        for each in roles
        if each.role.replicas
        for line in (*role_problems(each.role), *memory_problems(each.memory))
    ]
    return DeploymentPlan(
        roles,
        tuple(pairs),
        (*problems, *placement.problems),
        (*_warnings(roles, pairs, automatic), *_shares(config)),
        placement.replicas,
    )


def _check_names(option: str, given: Iterable[str], known: Sequence[str]) -> None:
    if unknown := [name for name in given if name not in known]:
        raise ConfigurationError(f"--{option} {unknown[0]}: not one of {', '.join(known) or 'none'}")


def _role(config: LeadoutConfig, name: str, key: str, section: WorkerSection, options: PlanOptions) -> RolePlan:
    device = _accelerator(name, key, section, options)
    found = find_shape(key, section.model)
    ranks = section.tensor_parallel_size if isinstance(section, TargetSection) else 1
    need = _need(config, key, section, found, ranks)
    role = Role(key, device, section.most_replicas, ranks, section.num_cpus, section.num_gpus, section.node_labels)
    return RolePlan(name, role, found, plan_memory(need, device), _step(section, need, device, options))


def _accelerator(name: str, key: str, section: WorkerSection, options: PlanOptions) -> Accelerator:
    """The one that the command names, or that the labels ask for; without GPUs, the CPU."""
    said = options.accelerators.get(name)
    asked = section.node_labels.get(RAY_ACCELERATOR_LABEL, "")
    if said is None and is_one_value(asked):
        said = asked
    if said is None and section.num_gpus == 0:
        said = "CPU"
    if said is None:
        raise ConfigurationError(
            f"{key}: which GPU? Give --accelerator {name}=NAME, or node_labels with {RAY_ACCELERATOR_LABEL} "
            f"(names: {', '.join(CATALOGUE)})"
        )
    try:
        return accelerator(said)
    except PlanError as error:
        raise ConfigurationError(f"{key}: {error} (--accelerator {name}=NAME)") from error


def _need(config: LeadoutConfig, key: str, section: WorkerSection, found: FoundShape, ranks: int) -> WorkerNeed:
    own, cap = found.shape.context_tokens, section.max_context_tokens
    known = [length for length in (own, cap) if length is not None]
    if not known:
        raise ConfigurationError(f"{key}.max_context_tokens: {section.model} states no context length; set it")
    drafts = config.speculation.max_draft_tokens
    sequences = min(config.router.max_batch_sequences, config.router.max_running_sequences)
    is_target = isinstance(section, TargetSection)
    rows = sequences * (drafts + 1 if is_target else 1)
    return WorkerNeed(
        key=key,
        shape=found.shape,
        dtype=section.dtype,
        # Which form "auto" takes is measured when it loads; the plain one is the largest.
        quantization="none" if section.quantization == "auto" else section.quantization,
        ranks=ranks,
        pool_bytes=int(section.kv_cache_gib * 2**30),
        context_tokens=min(known),
        sequences=sequences,
        step_tokens=config.router.prefill_chunk_tokens + rows,
        logit_rows=rows,
        device_share=section.num_gpus or 1.0,
    )


def _step(section: WorkerSection, need: WorkerNeed, device: Accelerator, options: PlanOptions) -> StepTime:
    """What was given, or the configuration emulates, or the roofline says; what was given is of one narrow step."""
    roofline = roofline_step(need.shape, device, need.dtype, need.quantization, need.ranks, options.context_tokens)
    given = options.draft_step_ms.get(section.name) if isinstance(section, DrafterSection) else options.target_step_ms
    if given is not None:
        return replace(roofline, base_ms=max(0.0, given - roofline.sequence_ms), origin="given")
    if isinstance(section, TargetSection) and section.emulated is not None:
        return StepTime(section.emulated.base_ms, section.emulated.token_ms, origin="emulated")
    if isinstance(section, DrafterSection) and section.emulated is not None:
        return StepTime(section.emulated.step_ms, section.emulated.row_ms, origin="emulated")
    return roofline


def _pair(config: LeadoutConfig, target: RolePlan, drafter: RolePlan, options: PlanOptions) -> PairPlan:
    times = PairTimes(target.step, drafter.step)
    most = target.memory.need.sequences
    sizes = [*(size for size in SEQUENCES if size < most), most]
    longest = config.speculation.max_draft_tokens
    rows = [capacity_row(times, options.acceptance, size, longest, options.hit) for size in sizes]
    return PairPlan(drafter.name, tuple(rows), drafters_for(rows, target.role.replicas), drafter.role.replicas)


def _placed(roles: Sequence[RolePlan], nodes: Sequence[Node]) -> Placement:
    """Place GPUs alone, by the accelerators that were planned with; of CPUs nothing is known."""
    if not nodes:
        return Placement((), ())
    asked = []
    for each in roles:
        device = each.role.accelerator
        if device.is_gpu:
            labels = {RAY_ACCELERATOR_LABEL: device.ray_type or "", **each.role.labels}
            asked.append(replace(each.role, num_cpus=0.0, labels=labels))
    return place(asked, nodes)


def _shares(config: LeadoutConfig) -> list[str]:
    """What each of several routers gets of the largest numbers of replicas, and who has to do without drafters."""
    if config.router.replicas == 1:
        return []
    sharding, targets = config.sharding(), config.target.most_replicas
    shares = {each.name: sharding.drafters(each.most_replicas, targets) for each in config.drafters}
    told = [("target", sharding.targets(targets)), *shares.items()]
    dealt = "; ".join(f"{name} {' + '.join(map(str, share))}" for name, share in told)
    lines = [f"{config.router.replicas} routers share the replicas: {dealt}"]
    lines += [
        f"drafter {name}: {share.count(0)} of {len(share)} routers have none; requests there get other drafts, or none"
        for name, share in shares.items()
        if 0 in share and any(share)
    ]
    return lines


def _warnings(roles: Sequence[RolePlan], pairs: Sequence[PairPlan], automatic: Sequence[str]) -> list[str]:
    lines = [line for each in roles if each.role.replicas for line in memory_warnings(each.memory)]
    lines += topology_warnings([each.role for each in roles])
    lines += [
        f"{each.role.key}: sizes of {each.shape.shape.name} are from a table, not from its files"
        for each in roles
        if each.shape.origin == "table"
    ]
    lines += [
        f"{each.role.key}: a step of {each.step.ms(1, 1):.3g} ms on {each.role.accelerator.name} is only an order of "
        f"magnitude; measure it (leadout check-pair)"
        for each in roles
        if each.step.origin == "roofline" and not each.role.accelerator.is_gpu
    ]
    lines += [f"{key}.quantization: auto is counted as none, the largest form" for key in automatic]
    for pair in pairs:
        if not pair.needed:
            lines.append(f"drafter {pair.drafter} does not pay at any load")
        elif pair.configured < pair.needed:
            few = f"the targets would keep {pair.needed} replicas busy, and {pair.configured} are configured"
            lines.append(f"drafter {pair.drafter}: {few}")
    return lines
