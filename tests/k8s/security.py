"""Who may reach, read and become what: pods, ports, secrets, budgets, and names that lead somewhere."""

from collections.abc import Iterator
from typing import Any

from tests.k8s.manifests import Document, Manifests
from tests.k8s.operator_rules import Lint, name_of

SERVE_PORT = 8000
SECRET_WORDS = ("PASSWORD", "TOKEN", "SECRET", "API_KEY")
RAY_LABELS = ("ray.io/is-ray-node", "ray.io/node-type", "ray.io/cluster", "ray.io/group")


def _containers(pod: Document) -> Iterator[Document]:
    yield from pod["spec"].get("initContainers", [])
    yield from pod["spec"]["containers"]


def pods_are_restricted(manifests: Manifests) -> list[str]:
    """What the Pod Security Standard `restricted` asks for; images are read-only where Ray does not write."""
    problems = []
    for name, pod in manifests.pods():
        context = pod["spec"].get("securityContext", {})
        if not context.get("runAsNonRoot") or not context.get("runAsUser"):
            problems.append(f"{name}: may run as root")
        if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
            problems.append(f"{name}: seccompProfile")
        for container in _containers(pod):
            own = container.get("securityContext", {})
            if own.get("allowPrivilegeEscalation") is not False or own.get("capabilities") != {"drop": ["ALL"]}:
                problems.append(f"{name}: {container['name']} may gain privileges")
            if not container["name"].startswith("ray-") and not own.get("readOnlyRootFilesystem"):
                problems.append(f"{name}: {container['name']} may write to its image")
    return problems


def pods_have_requests_and_limits(manifests: Manifests) -> list[str]:
    return [
        f"{name}: {container['name']}"
        for name, pod in manifests.pods()
        for container in _containers(pod)
        if not {"cpu", "memory"} <= set(container.get("resources", {}).get("limits", {}))
        or not container["resources"].get("requests")
    ]


def only_the_head_talks_to_kubernetes(manifests: Manifests) -> list[str]:
    head = manifests.head["template"]
    return [
        name
        for name, pod in manifests.pods()
        if pod is not head and pod["spec"].get("automountServiceAccountToken") is not False
    ]


def secrets_are_references(manifests: Manifests) -> list[str]:
    problems = [f"Secret {secret['metadata']['name']}" for secret in manifests.of_kind("Secret")]
    for name, pod in manifests.pods():
        problems += [
            f"{name}: {entry['name']}"
            for container in _containers(pod)
            for entry in container.get("env", [])
            if any(word in entry["name"] for word in SECRET_WORDS) and "valueFrom" not in entry
        ]
    return problems


def clients_need_a_key(manifests: Manifests) -> list[str]:
    ingress = manifests.leadout.ingress
    return [] if ingress.api_keys_env or ingress.api_keys_file else ["ingress has no API keys"]


def _selects_ray_pods(policy: Document) -> bool:
    selector = policy["spec"].get("podSelector", {})
    keys = [*selector.get("matchLabels", {}), *(entry["key"] for entry in selector.get("matchExpressions", []))]
    return not keys or any(key in RAY_LABELS for key in keys)


def ray_is_reachable_only_inside_the_cluster(manifests: Manifests) -> list[str]:
    """A policy closes the Ray pods; from everywhere, only the Serve port is open; no Service publishes the head."""
    policies = [policy for policy in manifests.of_kind("NetworkPolicy") if _selects_ray_pods(policy)]
    incoming = [policy for policy in policies if "Ingress" in policy["spec"]["policyTypes"]]
    closed = {"ray.io/is-ray-node": "yes"}
    problems = []
    if not any(closed.items() <= policy["spec"]["podSelector"].get("matchLabels", {}).items() for policy in incoming):
        problems.append("no policy closes the Ray pods")
    for rule in [rule for policy in incoming for rule in policy["spec"].get("ingress", [])]:
        anybody = not rule.get("from") or any("podSelector" not in peer for peer in rule["from"])
        if anybody and [port.get("port") for port in rule.get("ports", [])] != [SERVE_PORT]:
            problems.append(f"open to everybody: {rule.get('ports', 'all ports')}")
    published = [kind for kind in ("Ingress", "RayCluster") if manifests.of_kind(kind)]
    published += [service["metadata"]["name"] for service in manifests.of_kind("Service") if "type" in service["spec"]]
    published += ["head"] * (manifests.head.get("serviceType", "ClusterIP") != "ClusterIP")
    published += ["dashboard"] * bool(manifests.head.get("enableIngress"))
    for route in manifests.of_kind("HTTPRoute"):
        backends = [backend for rule in route["spec"]["rules"] for backend in rule["backendRefs"]]
        published += [backend["name"] for backend in backends if backend["name"].endswith("head-svc")]
    return problems + [f"published: {name}" for name in published]


def budgets_are_what_a_ray_cluster_can_have(manifests: Manifests) -> list[str]:
    """Without a scale subresource only a number of available pods is understood."""
    budgets = {budget["metadata"]["name"]: budget["spec"] for budget in manifests.of_kind("PodDisruptionBudget")}
    problems = [f"{name} is missing" for name in ("leadout-head", "leadout-target") if name not in budgets]
    return problems + [
        f"{name}: {spec}"
        for name, spec in budgets.items()
        if "maxUnavailable" in spec or not isinstance(spec.get("minAvailable"), int)
    ]


def _claims(manifests: Manifests) -> set[str]:
    templates = [
        f"{claim['metadata']['name']}"
        for stateful in manifests.of_kind("StatefulSet")
        for claim in stateful["spec"].get("volumeClaimTemplates", [])
    ]
    return {claim["metadata"]["name"] for claim in manifests.of_kind("PersistentVolumeClaim")} | set(templates)


def names_lead_somewhere(manifests: Manifests) -> list[str]:
    """Accounts, claims, ConfigMaps and labels that are referred to exist."""
    accounts = {account["metadata"]["name"] for account in manifests.of_kind("ServiceAccount")}
    maps = {document["metadata"]["name"] for document in manifests.of_kind("ConfigMap")}
    problems = []
    for name, pod in manifests.pods():
        spec: dict[str, Any] = pod["spec"]
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        account = spec.get("serviceAccountName", "default")
        problems += [f"{name}: account {account}"] * (account not in accounts | {"default"})
        for volume in volumes.values():
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            config = volume.get("configMap", {}).get("name")
            problems += [f"{name}: claim {claim}"] * (claim is not None and claim not in _claims(manifests))
            problems += [f"{name}: ConfigMap {config}"] * (config is not None and config not in maps)
        mounts = [mount["name"] for container in _containers(pod) for mount in container.get("volumeMounts", [])]
        problems += [f"{name}: volume {mount}" for mount in mounts if mount not in set(volumes) | _claims(manifests)]
    labelled = [group for group in manifests.groups if "app.kubernetes.io/part-of" not in _labels(group)]
    return problems + [f"{name_of(group)}: no policy or budget finds its pods" for group in labelled]


def _labels(group: Document) -> dict[str, str]:
    labels: dict[str, str] = group["template"].get("metadata", {}).get("labels", {})
    return labels


def monitors_scrape_ports_that_exist(manifests: Manifests) -> list[str]:
    ports: dict[str, set[str]] = {"head": set(), "worker": set()}
    for group, container in manifests.ray_containers():
        ports["head" if group == "head" else "worker"] |= {port["name"] for port in container["ports"]}
    return [
        f"{monitor['metadata']['name']}: {endpoint['port']}"
        for monitor in manifests.of_kind("PodMonitor")
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
        if endpoint["port"] not in ports[monitor["spec"]["selector"]["matchLabels"]["ray.io/node-type"]]
    ]


SECURITY: tuple[Lint, ...] = (
    pods_are_restricted,
    pods_have_requests_and_limits,
    only_the_head_talks_to_kubernetes,
    secrets_are_references,
    clients_need_a_key,
    ray_is_reachable_only_inside_the_cluster,
    budgets_are_what_a_ray_cluster_can_have,
    names_lead_somewhere,
    monitors_scrape_ports_that_exist,
)
