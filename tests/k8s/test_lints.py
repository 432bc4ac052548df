"""Each lint finds nothing in the manifests as they are, and the fault that is planted for it. Needs no kustomize."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.k8s.lessons import LESSONS
from tests.k8s.manifests import Manifests, composed
from tests.k8s.operator_rules import OPERATOR_RULES, Lint
from tests.k8s.security import SECURITY

LINTS: dict[str, Lint] = {lint.__name__: lint for lint in (*OPERATOR_RULES, *LESSONS, *SECURITY)}
SOUND = composed()
Fault = Callable[[Manifests], Any]


def worker(manifests: Manifests) -> Any:
    return manifests.workers[0]["template"]["spec"]


def container(manifests: Manifests) -> Any:
    return worker(manifests)["containers"][0]


def head(manifests: Manifests) -> Any:
    return manifests.head["template"]["spec"]["containers"][0]


def set_variable(spec: Any, name: str) -> None:
    spec["env"].append({"name": name, "value": "x"})


def served(old: str, new: str) -> Fault:
    """A fault of the Serve configuration."""

    def plant(manifests: Manifests) -> None:
        text = manifests.spec["serveConfigV2"]
        assert old in text
        manifests.spec["serveConfigV2"] = text.replace(old, new)

    return plant


def policy(manifests: Manifests, name: str) -> Any:
    return manifests.one("NetworkPolicy", name)["spec"]


def options(manifests: Manifests) -> Any:
    return manifests.spec["upgradeStrategy"]["clusterUpgradeOptions"]


def monitored_on(port: str) -> Fault:
    """A fault of monitoring, of which the documents here have nothing."""
    spec = {"selector": {"matchLabels": {"ray.io/node-type": "worker"}}, "podMetricsEndpoints": [{"port": port}]}
    return lambda manifests: manifests.documents.append(
        {"kind": "PodMonitor", "metadata": {"name": "workers"}, "spec": spec}
    )


def with_gpus(manifests: Manifests) -> None:
    container(manifests)["resources"]["limits"]["nvidia.com/gpu"] = "1"
    manifests.workers[0]["resources"]["GPU"] = "1"


FAULTS: list[tuple[str, Fault]] = [
    ("service_name_leaves_room_for_suffixes", lambda m: m.service["metadata"].update(name="a" * 48)),
    ("service_name_leaves_room_for_suffixes", lambda m: m.service["metadata"].update(name="7b")),
    ("ray_container_comes_first", lambda m: worker(m)["containers"].insert(0, {"name": "sidecar"})),
    ("start_parameters_are_strings", lambda m: m.workers[0]["rayStartParams"].update({"dashboard-port": 8265})),
    ("resources_are_given_once", lambda m: m.workers[0]["rayStartParams"].update({"num-cpus": "1"})),
    ("labels_are_group_labels", lambda m: m.workers[0]["rayStartParams"].update(labels="leadout/role=draft")),
    ("autoscaler_v2_restarts_no_pods_in_place", lambda m: worker(m).update(restartPolicy="Always")),
    ("autoscaler_v2_restarts_no_pods_in_place", lambda m: set_variable(head(m), "RAY_enable_autoscaler_v2")),
    (
        "autoscaler_v2_restarts_no_pods_in_place",
        lambda m: (m.cluster.pop("autoscalerOptions"), m.workers[0].update(idleTimeoutSeconds=60)),
    ),
    ("fault_tolerance_is_configured_once", lambda m: set_variable(head(m), "REDIS_PASSWORD")),
    ("fault_tolerance_is_configured_once", lambda m: set_variable(head(m), "RAY_REDIS_ADDRESS")),
    (
        "fault_tolerance_is_configured_once",
        lambda m: m.service["metadata"]["annotations"].update({"ray.io/ft-enabled": "true"}),
    ),
    ("incremental_upgrade_is_complete", lambda m: m.cluster.update(enableInTreeAutoscaling=False)),
    ("incremental_upgrade_is_complete", lambda m: options(m).update(stepSizePercent=60)),
    ("incremental_upgrade_is_complete", lambda m: options(m).update(intervalSeconds=0)),
    ("incremental_upgrade_is_complete", lambda m: options(m).pop("gatewayClassName")),
    ("ray_asks_for_a_token", lambda m: m.cluster["authOptions"].update(mode="disabled")),
    ("ray_asks_for_a_token", lambda m: m.cluster["authOptions"].update(enableK8sTokenAuth=True)),
    ("ray_asks_for_a_token", lambda m: m.cluster.update(rayVersion="2.51.0")),
    ("alpha_fields_are_not_used", lambda m: m.cluster.update(networkPolicy={"mode": "DenyAll"})),
    ("alpha_fields_are_not_used", lambda m: m.cluster.update(tlsOptions={"enabled": True})),
    ("ray_version_is_that_of_the_image", lambda m: m.cluster.update(rayVersion="2.61.0")),
    ("head_has_a_memory_limit_and_no_cpus", lambda m: head(m)["resources"]["limits"].pop("memory")),
    ("head_has_a_memory_limit_and_no_cpus", lambda m: m.head["resources"].update(CPU="2")),
    ("replica_bounds_are_in_order", lambda m: m.workers[1].update(minReplicas=3)),
    ("nothing_is_suspended_under_the_autoscaler", lambda m: m.workers[0].update(suspend=True)),
    ("every_pod_hosts_one_replica_of_one_role", lambda m: m.workers[0]["resources"].update(CPU="2")),
    ("every_pod_hosts_one_replica_of_one_role", lambda m: m.workers[0]["labels"].clear()),
    ("every_pod_hosts_one_replica_of_one_role", lambda m: m.workers[1].update(minReplicas=2, replicas=2)),
    ("every_pod_hosts_one_replica_of_one_role", served("proxy_location: EveryNode", "proxy_location: HeadOnly")),
    ("every_pool_has_a_group", lambda m: m.workers.pop(0)),
    ("router_and_ingress_stay_with_the_targets", served('"!in(draft,head)"', '"!draft"')),
    ("tensor_parallelism_stays_in_one_pod", lambda m: m.workers[1].update(numOfHosts=2)),
    ("tensor_parallelism_stays_in_one_pod", lambda m: m.workers[0]["resources"].update(GPU="4")),
    ("tensor_parallelism_stays_in_one_pod", lambda m: m.workers[0]["resources"].update(CPU="16")),
    ("gpu_pods_choose_their_nodes", with_gpus),
    ("groups_can_start_from_zero", lambda m: m.workers[0].pop("labels")),
    ("groups_can_start_from_zero", lambda m: m.workers[0].pop("resources")),
    ("upgrades_do_not_wait_for_a_second_set_of_gpus", lambda m: m.spec.pop("upgradeStrategy")),
    ("old_clusters_outlive_their_requests", lambda m: m.spec.pop("rayClusterDeletionDelaySeconds")),
    ("pods_drain_before_they_end", lambda m: container(m).pop("lifecycle")),
    ("pods_drain_before_they_end", lambda m: worker(m).update(terminationGracePeriodSeconds=60)),
    ("start_up_outlasts_a_cold_download", lambda m: m.service["metadata"].pop("annotations")),
    (
        "start_up_outlasts_a_cold_download",
        served("      speculation:", "      worker_load_timeout_s: 3600\n      speculation:"),
    ),
    ("readiness_follows_serve", lambda m: container(m)["readinessProbe"]["httpGet"].update(path="/")),
    ("readiness_follows_serve", served("host: 0.0.0.0", "host: 127.0.0.1")),
    ("workers_serve_while_the_head_is_down", lambda m: m.spec.pop("excludeHeadPodFromServeSvc")),
    (
        "redis_keeps_what_it_is_told",
        lambda m: m.one("StatefulSet", "leadout-redis")["spec"].pop("volumeClaimTemplates"),
    ),
    (
        "redis_keeps_what_it_is_told",
        lambda m: m.documents.remove(m.one("PodDisruptionBudget", "leadout-redis")),
    ),
    ("weights_are_downloaded_once", lambda m: container(m)["volumeMounts"].pop(0)),
    ("weights_are_downloaded_once", lambda m: container(m)["env"].pop(1)),
    ("streams_are_not_cut_at_the_gateway", lambda m: m.one("HTTPRoute", "leadout")["spec"]["rules"][0].pop("timeouts")),
    ("streams_are_not_cut_at_the_gateway", lambda m: m.one("HTTPRoute", "leadout")["spec"]["rules"][0].pop("filters")),
    ("pods_are_restricted", lambda m: worker(m)["securityContext"].pop("runAsNonRoot")),
    ("pods_are_restricted", lambda m: container(m)["securityContext"].update(allowPrivilegeEscalation=True)),
    (
        "pods_are_restricted",
        lambda m: m.one("Job", "leadout-prefetch")["spec"]["template"]["spec"]["containers"][0]["securityContext"].pop(
            "readOnlyRootFilesystem"
        ),
    ),
    ("pods_have_requests_and_limits", lambda m: container(m)["resources"].pop("requests")),
    ("only_the_head_talks_to_kubernetes", lambda m: worker(m).pop("automountServiceAccountToken")),
    ("secrets_are_references", lambda m: set_variable(container(m), "HF_TOKEN")),
    (
        "secrets_are_references",
        lambda m: m.documents.append({"kind": "Secret", "metadata": {"name": "leadout-api-keys"}}),
    ),
    ("clients_need_a_key", served("api_keys_env: LEADOUT_API_KEYS", "replicas: 1")),
    ("ray_is_reachable_only_inside_the_cluster", lambda m: m.documents.remove(m.one("NetworkPolicy", "leadout-ray"))),
    ("ray_is_reachable_only_inside_the_cluster", lambda m: policy(m, "leadout-ray")["ingress"][1].pop("from")),
    (
        "ray_is_reachable_only_inside_the_cluster",
        lambda m: policy(m, "leadout-serve")["ingress"][0]["ports"].append({"port": 8265}),
    ),
    ("ray_is_reachable_only_inside_the_cluster", lambda m: m.head.update(serviceType="LoadBalancer")),
    (
        "budgets_are_what_a_ray_cluster_can_have",
        lambda m: m.one("PodDisruptionBudget", "leadout-target")["spec"].update(maxUnavailable=1),
    ),
    (
        "budgets_are_what_a_ray_cluster_can_have",
        lambda m: m.documents.remove(m.one("PodDisruptionBudget", "leadout-head")),
    ),
    ("names_lead_somewhere", lambda m: worker(m).update(serviceAccountName="nobody")),
    ("names_lead_somewhere", lambda m: worker(m)["volumes"][0]["persistentVolumeClaim"].update(claimName="other")),
    ("names_lead_somewhere", lambda m: m.workers[0]["template"].pop("metadata")),
    ("monitors_scrape_ports_that_exist", monitored_on("as-metrics")),
]


@pytest.mark.parametrize("name", LINTS)
def test_the_base_and_its_components_pass(name: str) -> None:
    assert LINTS[name](SOUND) == []


@pytest.mark.parametrize(("name", "plant"), FAULTS, ids=[f"{name}-{n}" for n, (name, _) in enumerate(FAULTS)])
def test_a_planted_fault_is_found(name: str, plant: Fault) -> None:
    faulty = SOUND.changed()
    plant(faulty)
    assert LINTS[name](faulty)


def test_every_lint_has_a_fault() -> None:
    assert {name for name, _ in FAULTS} == set(LINTS)
