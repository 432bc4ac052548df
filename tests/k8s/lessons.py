"""What public complaints about such deployments teach: placement, upgrades, draining, caches, streams."""

import re

from ray._raylet import node_labels_match_selector

from deployments.app import SHUTDOWN_MARGIN_S
from deployments.config import WorkerSection
from tests.k8s.manifests import Document, Manifests
from tests.k8s.operator_rules import Lint, name_of, variables

GPU = "nvidia.com/gpu"
SECONDS = {"s": 1, "m": 60, "h": 3600}


def seconds(duration: str) -> float:
    """A Go duration of one unit, or plain seconds."""
    return float(duration) if duration.isdigit() else float(duration[:-1]) * SECONDS[duration[-1]]


def _sections(manifests: Manifests) -> list[tuple[str, WorkerSection, int]]:
    """Each pool's name, section and processes per replica."""
    target = manifests.leadout.target
    drafters = [(f"drafter {section.name}", section, 1) for section in manifests.leadout.drafters]
    return [("target", target, target.tensor_parallel_size), *drafters]


def _hosts(group: Document, selector: dict[str, str]) -> bool:
    return bool(node_labels_match_selector(group.get("labels", {}), selector))


def _replicas_that_fit(group: Document, section: WorkerSection, processes: int) -> float:
    """How many replicas of a pool one pod of the group has room for."""
    offered = group.get("resources", {})
    asked = {key: amount * processes for key, amount in section.worker_resources().items()}
    return min(float(offered.get(key, 0)) // amount for key, amount in asked.items())


def every_pod_hosts_one_replica_of_one_role(manifests: Manifests) -> list[str]:
    """A pod without a replica has no proxy and is never ready; a pod with two roles is sized for neither."""
    problems = [] if manifests.serve_config.get("proxy_location") == "EveryNode" else ["proxy_location"]
    for group in manifests.workers:
        pools = [pool for pool in _sections(manifests) if _hosts(group, pool[1].node_labels)]
        if len(pools) != 1:
            problems.append(f"{name_of(group)}: hosts {[name for name, *_ in pools]}")
            continue
        ((pool, section, processes),) = pools
        if (fit := _replicas_that_fit(group, section, processes)) != 1:
            problems.append(f"{name_of(group)}: {fit:g} replicas of the {pool} fit into a pod")
        if not group["minReplicas"] <= section.replicas <= group["maxReplicas"]:
            problems.append(f"{name_of(group)}: {section.replicas} replicas of the {pool}")
    return problems


def every_pool_has_a_group(manifests: Manifests) -> list[str]:
    return [
        name
        for name, section, _ in _sections(manifests)
        if not any(_hosts(group, section.node_labels) for group in manifests.workers)
    ]


def router_and_ingress_stay_with_the_targets(manifests: Manifests) -> list[str]:
    """The head may restart and drafters may all go, and neither may take a stream with it."""
    problems = []
    for name, section in (("router", manifests.leadout.router), ("ingress", manifests.leadout.ingress)):
        hosts = {group["labels"]["leadout/role"] for group in manifests.groups if _hosts(group, section.node_labels)}
        problems += [f"{name} may run on {role}" for role in sorted(hosts - {"target"})]
    return problems


def tensor_parallelism_stays_in_one_pod(manifests: Manifests) -> list[str]:
    """The GPUs that Ray is told of are those of the pod, which is one host."""
    problems = []
    for group in manifests.workers:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        if float(limits.get(GPU, 0)) != float(group.get("resources", {}).get("GPU", 0)):
            problems.append(f"{name_of(group)}: GPUs of Ray and of the pod differ")
        if float(limits["cpu"]) < float(group.get("resources", {}).get("CPU", 0)):
            problems.append(f"{name_of(group)}: Ray is told of more CPUs than the pod has")
        if group.get("numOfHosts", 1) != 1:
            problems.append(f"{name_of(group)}: numOfHosts")
    return problems


def gpu_pods_choose_their_nodes(manifests: Manifests) -> list[str]:
    problems = []
    for group in manifests.workers:
        spec = group["template"]["spec"]
        if GPU in spec["containers"][0]["resources"]["limits"]:
            tolerated = {"key": GPU, "operator": "Exists", "effect": "NoSchedule"} in spec.get("tolerations", [])
            problems += [f"{name_of(group)}: toleration"] * (not tolerated)
            problems += [f"{name_of(group)}: nodeSelector"] * (not spec.get("nodeSelector"))
    return problems


def groups_can_start_from_zero(manifests: Manifests) -> list[str]:
    """The autoscaler knows an empty group by its resources and labels alone."""
    missing = [(name_of(group), key) for group in manifests.groups for key in ("resources", "labels")]
    known = {name_of(group): group for group in manifests.groups}
    return [f"{name}: {key}" for name, key in missing if not known[name].get(key)]


def upgrades_do_not_wait_for_a_second_set_of_gpus(manifests: Manifests) -> list[str]:
    kind = manifests.spec.get("upgradeStrategy", {}).get("type")
    return [] if kind in ("None", "NewClusterWithIncrementalUpgrade") else [f"upgradeStrategy {kind}"]


def grace_s(manifests: Manifests) -> float:
    """Return the longest that Serve gives a replica to end."""
    return manifests.leadout.ingress.graceful_shutdown_timeout_s + SHUTDOWN_MARGIN_S


def old_clusters_outlive_their_requests(manifests: Manifests) -> list[str]:
    delay = manifests.spec.get("rayClusterDeletionDelaySeconds", 60)
    longest = manifests.leadout.ingress.request_timeout_s
    return [] if delay >= longest + grace_s(manifests) else [f"{delay} s, requests take {longest:g} s"]


def pods_drain_before_they_end(manifests: Manifests) -> list[str]:
    problems = []
    for group in manifests.workers:
        spec = group["template"]["spec"]
        hook = spec["containers"][0].get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        pause = re.search(r"sleep (\d+)", " ".join(hook))
        if pause is None:
            problems.append(f"{name_of(group)}: no preStop pause")
        elif spec.get("terminationGracePeriodSeconds", 30) <= int(pause[1]) + grace_s(manifests):
            problems.append(f"{name_of(group)}: killed before its streams end")
    return problems


def start_up_outlasts_a_cold_download(manifests: Manifests) -> list[str]:
    given = manifests.service["metadata"].get("annotations", {}).get("ray.io/initializing-timeout", "")
    needed = 2 * manifests.leadout.worker_load_timeout_s
    valid = re.fullmatch(r"\d+[smh]?", given) is not None
    return (
        [] if valid and seconds(given) >= needed else [f"initializing-timeout {given!r}, loads may take {needed:g} s"]
    )


def readiness_follows_serve(manifests: Manifests) -> list[str]:
    """Without a probe KubeRay adds its own, which asks Serve as well."""
    problems = []
    for group in manifests.workers:
        container = group["template"]["spec"]["containers"][0]
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        listens = manifests.serve_config["http_options"]
        if (listens["host"], ports.get("serve")) != ("0.0.0.0", listens["port"]):
            problems.append(f"{name_of(group)}: Serve listens elsewhere than the port named serve")
        probe = container.get("readinessProbe")
        if probe and (
            probe.get("httpGet", {}).get("path") != "/-/healthz" or probe["httpGet"].get("port") not in ("serve", 8000)
        ):
            problems.append(f"{name_of(group)}: readinessProbe")
    return problems


def workers_serve_while_the_head_is_down(manifests: Manifests) -> list[str]:
    return [] if manifests.spec.get("excludeHeadPodFromServeSvc") is True else ["excludeHeadPodFromServeSvc"]


def redis_keeps_what_it_is_told(manifests: Manifests) -> list[str]:
    if "gcsFaultToleranceOptions" not in manifests.cluster:
        return []
    redis = manifests.one("StatefulSet", "leadout-redis")["spec"]
    container = redis["template"]["spec"]["containers"][0]
    claims = {claim["metadata"]["name"] for claim in redis.get("volumeClaimTemplates", [])}
    kept = any(mount["name"] in claims and mount["mountPath"] == "/data" for mount in container["volumeMounts"])
    budgets = [budget["metadata"]["name"] for budget in manifests.of_kind("PodDisruptionBudget")]
    problems = [] if kept and "appendonly yes" in " ".join(container["command"]) else ["not persistent"]
    return problems + ["no disruption budget"] * ("leadout-redis" not in budgets)


def weights_are_downloaded_once(manifests: Manifests) -> list[str]:
    """Every Ray container, and the job that comes before, has the cache of the hub on the same claim."""
    (job,) = [document for document in manifests.of_kind("Job") if "prefetch" in document["metadata"]["name"]]
    users = [(name_of(group), group["template"]["spec"]) for group in manifests.groups]
    users.append(("prefetch", job["spec"]["template"]["spec"]))
    problems, caches = [], set()
    for name, spec in users:
        container = spec["containers"][0]
        home = str(variables(container).get("HF_HOME", {}).get("value", ""))
        claims = {
            volume["name"]: volume.get("persistentVolumeClaim", {}).get("claimName") for volume in spec["volumes"]
        }
        mounts = {mount["mountPath"]: claims.get(mount["name"]) for mount in container["volumeMounts"]}
        claim = next((claim for path, claim in mounts.items() if claim and home.startswith(f"{path}/")), None)
        caches.add((home, claim))
        problems += [f"{name}: HF_HOME is on no claim"] * (claim is None)
    if variables(job["spec"]["template"]["spec"]["containers"][0])["SERVE_CONFIG"].get("value") == "":
        problems.append("prefetch: SERVE_CONFIG is empty")
    return problems + ["several caches"] * (len(caches) > 1)


def streams_are_not_cut_at_the_gateway(manifests: Manifests) -> list[str]:
    problems = []
    for rule in [rule for route in manifests.of_kind("HTTPRoute") for rule in route["spec"]["rules"]]:
        if rule.get("timeouts") != {"request": "0s", "backendRequest": "0s"}:
            problems.append("timeouts")
        headers = [
            header
            for entry in rule.get("filters", [])
            for header in entry.get("responseHeaderModifier", {}).get("set", [])
        ]
        problems += ["X-Accel-Buffering"] * ({"name": "X-Accel-Buffering", "value": "no"} not in headers)
    return problems


LESSONS: tuple[Lint, ...] = (
    every_pod_hosts_one_replica_of_one_role,
    every_pool_has_a_group,
    router_and_ingress_stay_with_the_targets,
    tensor_parallelism_stays_in_one_pod,
    gpu_pods_choose_their_nodes,
    groups_can_start_from_zero,
    upgrades_do_not_wait_for_a_second_set_of_gpus,
    old_clusters_outlive_their_requests,
    pods_drain_before_they_end,
    start_up_outlasts_a_cold_download,
    readiness_follows_serve,
    workers_serve_while_the_head_is_down,
    redis_keeps_what_it_is_told,
    weights_are_downloaded_once,
    streams_are_not_cut_at_the_gateway,
)
