"""What KubeRay refuses, or does not refuse and should: one function per rule, each returning what is wrong."""

import re
from collections.abc import Callable
from typing import Any

from tests.k8s.manifests import Manifests

Lint = Callable[[Manifests], list[str]]
MAX_NAME = 47  # KubeRay appends its own suffixes for clusters and Services
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
TOKEN_SINCE, GROUP_RESOURCES = (2, 52), ("num-cpus", "num-gpus", "memory", "resources")
FT_VARIABLES = ("REDIS_PASSWORD", "RAY_REDIS_ADDRESS", "REDIS_USERNAME")
FT_ANNOTATIONS = ("ray.io/ft-enabled", "ray.io/external-storage-namespace")


def name_of(group: dict[str, Any]) -> str:
    """How messages call a group."""
    return str(group.get("groupName", "head"))


def variables(container: dict[str, Any]) -> dict[str, Any]:
    """A container's environment by name."""
    return {entry["name"]: entry for entry in container.get("env", [])}


def service_name_leaves_room_for_suffixes(manifests: Manifests) -> list[str]:
    name = manifests.service["metadata"]["name"]
    return [] if len(name) <= MAX_NAME and DNS_1035.fullmatch(name) else [f"RayService name {name}"]


def ray_container_comes_first(manifests: Manifests) -> list[str]:
    return [
        f"{group}: containers[0] is {container['name']}"
        for group, container in manifests.ray_containers()
        if not container["name"].startswith("ray-")
    ]


def start_parameters_are_strings(manifests: Manifests) -> list[str]:
    return [
        f"{name_of(group)}: rayStartParams.{key} is {value!r}"
        for group in manifests.groups
        for key, value in group.get("rayStartParams", {}).items()
        if not isinstance(value, str)
    ]


def resources_are_given_once(manifests: Manifests) -> list[str]:
    return [
        f"{name_of(group)}: resources and rayStartParams"
        for group in manifests.groups
        if group.get("resources") and any(key in group.get("rayStartParams", {}) for key in GROUP_RESOURCES)
    ]


def labels_are_group_labels(manifests: Manifests) -> list[str]:
    return [name_of(group) for group in manifests.groups if "labels" in group.get("rayStartParams", {})]


def autoscaler_v2_restarts_no_pods_in_place(manifests: Manifests) -> list[str]:
    if manifests.cluster.get("autoscalerOptions", {}).get("version") != "v2":
        return [f"{name_of(group)}: idleTimeoutSeconds" for group in manifests.workers if "idleTimeoutSeconds" in group]
    problems = [
        f"{name_of(group)}: restartPolicy"
        for group in manifests.groups
        if group["template"]["spec"].get("restartPolicy", "Never") != "Never"
    ]
    head = manifests.head["template"]["spec"]["containers"][0]
    return problems + ["RAY_enable_autoscaler_v2 beside version"] * ("RAY_enable_autoscaler_v2" in variables(head))


def fault_tolerance_is_configured_once(manifests: Manifests) -> list[str]:
    head = manifests.head
    given = [name for name in FT_VARIABLES if name in variables(head["template"]["spec"]["containers"][0])]
    given += [name for name in FT_ANNOTATIONS if name in manifests.service["metadata"].get("annotations", {})]
    given += [name for name in ("redis-password", "redis-username") if name in head.get("rayStartParams", {})]
    return given


def incremental_upgrade_is_complete(manifests: Manifests) -> list[str]:
    strategy = manifests.spec.get("upgradeStrategy", {})
    if strategy.get("type") != "NewClusterWithIncrementalUpgrade":
        return []
    options = strategy.get("clusterUpgradeOptions", {})
    problems = [] if manifests.cluster.get("enableInTreeAutoscaling") else ["needs enableInTreeAutoscaling"]
    if not 0 <= options.get("stepSizePercent", -1) <= options.get("maxSurgePercent", 100) <= 100:
        problems.append("stepSizePercent above maxSurgePercent")
    if options.get("intervalSeconds", 0) <= 0:
        problems.append("intervalSeconds")
    return problems + ["gatewayClassName"] * (not options.get("gatewayClassName"))


def ray_asks_for_a_token(manifests: Manifests) -> list[str]:
    options = manifests.cluster.get("authOptions", {})
    version = tuple(int(part) for part in manifests.cluster["rayVersion"].split(".")[:2])
    problems = [] if options.get("mode") == "token" and options.get("secretName") else ["authOptions"]
    problems += ["enableK8sTokenAuth is refused for a RayService"] * ("enableK8sTokenAuth" in options)
    return problems + ["rayVersion below 2.52"] * (version < TOKEN_SINCE)


def alpha_fields_are_not_used(manifests: Manifests) -> list[str]:
    return [key for key in ("networkPolicy", "tlsOptions", "historyServerOptions") if key in manifests.cluster]


def ray_version_is_that_of_the_image(manifests: Manifests) -> list[str]:
    version = manifests.cluster["rayVersion"]
    (base,) = re.findall(r"^ARG RAY_IMAGE=rayproject/ray:([0-9.]+)-", manifests.dockerfile, re.MULTILINE)
    return [] if version == base else [f"rayVersion {version}, image {base}"]


def head_has_a_memory_limit_and_no_cpus(manifests: Manifests) -> list[str]:
    resources = manifests.head["template"]["spec"]["containers"][0].get("resources", {})
    problems = [] if "memory" in resources.get("limits", {}) else ["no memory limit"]
    return problems + ["Ray may place workers on it"] * (manifests.head.get("resources", {}).get("CPU") != "0")


def replica_bounds_are_in_order(manifests: Manifests) -> list[str]:
    return [
        name_of(group)
        for group in manifests.workers
        if not 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    ]


def nothing_is_suspended_under_the_autoscaler(manifests: Manifests) -> list[str]:
    return [name_of(group) for group in manifests.workers if group.get("suspend")]


OPERATOR_RULES: tuple[Lint, ...] = (
    service_name_leaves_room_for_suffixes,
    ray_container_comes_first,
    start_parameters_are_strings,
    resources_are_given_once,
    labels_are_group_labels,
    autoscaler_v2_restarts_no_pods_in_place,
    fault_tolerance_is_configured_once,
    incremental_upgrade_is_complete,
    ray_asks_for_a_token,
    alpha_fields_are_not_used,
    ray_version_is_that_of_the_image,
    head_has_a_memory_limit_and_no_cpus,
    replica_bounds_are_in_order,
    nothing_is_suspended_under_the_autoscaler,
)
