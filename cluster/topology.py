"""Which role runs on which accelerator, what Ray is asked for, and whether given machines can hold it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from cluster.accelerators import RAY_ACCELERATOR_LABEL, Accelerator

PLACEMENT_STRATEGY = "STRICT_PACK"
"""All ranks of a replica on one node: they exchange activations in every layer."""
EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Role:
    """A target or a kind of drafter: `replicas` workers of `ranks` processes each, all alike.

    `key` is its section of the configuration, `labels` what a node must have to run it: Ray's label selectors, `value`,
    `in(a, b)`, or `!` before either, which also takes nodes without the label.
    """

    key: str
    accelerator: Accelerator
    replicas: int
    ranks: int = 1
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Ray's resources of each process of one replica; they form one placement group."""
        each = {name: count for name, count in (("CPU", self.num_cpus), ("GPU", self.num_gpus)) if count}
        return [dict(each) for _ in range(self.ranks)]

    @property
    def gpus(self) -> int:
        """GPUs that all replicas occupy; several replicas may share one."""
        if not self.num_gpus:
            return 0
        if self.num_gpus < 1:
            return ceil(self.replicas * self.ranks / int(1 / self.num_gpus + EPSILON))
        return ceil(self.replicas * self.ranks * self.num_gpus)


@dataclass(frozen=True, slots=True)
class Node:
    """A machine as Ray sees it: its labels, and resources such as CPU and GPU."""

    name: str
    labels: Mapping[str, str]
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where replicas run: pairs of a role's key and a node's name; and one line for each role that has no room."""

    replicas: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]


def role_problems(role: Role) -> Iterator[str]:
    """Yield what forbids this role, one line each with the key."""
    device = role.accelerator
    if device.is_gpu and not role.num_gpus:
        yield f"{role.key}.num_gpus: 0, and {device.name} is a GPU; set 1"
    if not device.is_gpu and role.num_gpus:
        yield f"{role.key}.num_gpus: {role.num_gpus:g}, and its accelerator is {device.name}; name the GPU"
    if role.ranks * role.num_gpus > device.per_node:
        yield (
            f"{role.key}.tensor_parallel_size: the {role.ranks} ranks of a replica share one machine, and "
            f"machines with more than {device.per_node} x {device.name} are not usual"
        )
    named = role.labels.get(RAY_ACCELERATOR_LABEL)
    if named is not None and not _selects(named, device.ray_type):
        yield (
            f"{role.key}.node_labels: {RAY_ACCELERATOR_LABEL} is {named}, and Ray's name of {device.name} "
            f"is {device.ray_type}"
        )


def topology_warnings(roles: Sequence[Role]) -> Iterator[str]:
    """Yield pairs of roles that may take each other's GPUs: other accelerators, and no label that tells them apart."""
    on_gpus = [role for role in roles if role.num_gpus and role.replicas]
    for index, first in enumerate(on_gpus):
        for second in on_gpus[index + 1 :]:
            if first.accelerator != second.accelerator and not _are_apart(first.labels, second.labels):
                yield (
                    f"{first.key} ({first.accelerator.name}) and {second.key} ({second.accelerator.name}) may be "
                    f"placed on each other's GPUs: give both node_labels, such as {RAY_ACCELERATOR_LABEL}: "
                    f"{first.accelerator.ray_type} and {second.accelerator.ray_type}"
                )


def place(roles: Iterable[Role], nodes: Sequence[Node]) -> Placement:
    """Place every replica on one node that has its labels and room for all its ranks, the largest replicas first.

    A replica goes to the node where it leaves least, so that whole machines stay for those that need them.
    """
    left = {node.name: Counter(node.resources) for node in nodes}
    placed: list[tuple[str, str]] = []
    problems: list[str] = []
    for role in sorted(roles, key=lambda each: (-each.ranks * each.num_gpus, -each.ranks * each.num_cpus)):
        asked = _sum(role.bundles)
        fitting = [node for node in nodes if _matches(role.labels, node.labels)]
        for number in range(role.replicas):
            room = [node for node in fitting if _has(left[node.name], asked)]
            if not room:
                problems.append(_no_room(role, number, fitting, left))
                break
            node = min(room, key=lambda each: left[each.name]["GPU"] - asked["GPU"])
            left[node.name].subtract(asked)
            placed.append((role.key, node.name))
    return Placement(tuple(placed), tuple(problems))


def _no_room(role: Role, placed: int, fitting: Sequence[Node], left: Mapping[str, Mapping[str, float]]) -> str:
    asked = _list(_sum(role.bundles))
    where = f"with the labels {_list(role.labels)}" if role.labels else "at all"
    if not fitting:
        return f"{role.key}: no node {where}"
    free = "; ".join(f"{node.name} has {_list(left[node.name])} left" for node in fitting)
    return f"{role.key}: no node for replica {placed + 1} of {role.replicas}, which needs {asked} on one node: {free}"


def _sum(bundles: Iterable[Mapping[str, float]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for bundle in bundles:
        total.update(bundle)
    return total


def _has(left: Mapping[str, float], asked: Mapping[str, float]) -> bool:
    return all(left.get(name, 0) + EPSILON >= count for name, count in asked.items())


def _matches(asked: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(_selects(selector, labels.get(name)) for name, selector in asked.items())


def is_one_value(selector: str) -> bool:
    """Whether a label selector names a single value."""
    return bool(selector) and not selector.startswith(("!", "in("))


def _selects(selector: str, value: str | None) -> bool:
    wanted, values = _parsed(selector)
    return (value in values) == wanted


def _parsed(selector: str) -> tuple[bool, frozenset[str]]:
    """Whether the label must have one of the values, or none of them; and the values."""
    values = selector.removeprefix("!")
    if values.startswith("in("):
        values = values[len("in(") : -1]
    return not selector.startswith("!"), frozenset(each.strip() for each in values.split(","))


def _are_apart(first: Mapping[str, str], second: Mapping[str, str]) -> bool:
    """Whether some label keeps the nodes of one from those of the other."""
    return any(_exclude(_parsed(first[name]), _parsed(second[name])) for name in first.keys() & second.keys())


def _exclude(first: tuple[bool, frozenset[str]], second: tuple[bool, frozenset[str]]) -> bool:
    if first[0] and second[0]:
        return not first[1] & second[1]
    if first[0] != second[0]:
        wanted, unwanted = (first[1], second[1]) if first[0] else (second[1], first[1])
        return wanted <= unwanted
    return False


def _list(items: Mapping[str, object]) -> str:
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float | int) else f"{name}={value}" for name, value in items.items()
    )
