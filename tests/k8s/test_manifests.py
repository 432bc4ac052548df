"""What kustomize renders is what Kubernetes, KubeRay, Serve and Leadout accept.

Rendering needs kubectl or kustomize. CRD schemas are read from the folder LEADOUT_SCHEMAS (rayservices-v1.schema.json
and CRDs of the Prometheus operator, as published by those projects); without it that part is skipped.
"""

import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.config import parse_config
from deployments.local_cluster import RAY_SETTINGS
from deployments.serve_config import read_serve_config
from tests.k8s.crd_schema import problems, schema_of
from tests.k8s.manifests import K8S, Document, Manifests, composed, kustomize_command, read, rendered
from tests.k8s.test_lints import LINTS

OVERLAYS = ("local-cpu", "a100-l4")
KUBERNETES = "1.33.0"
SCHEMAS = {
    "RayService": "rayservices-v1.schema.json",
    "PodMonitor": "monitoring.coreos.com_podmonitors.yaml",
    "PrometheusRule": "monitoring.coreos.com_prometheusrules.yaml",
}
# Of the Gateway API there is no schema in kubernetes-validate; the lints look at what matters of it.
OWN_KINDS = {*SCHEMAS, "Gateway", "HTTPRoute"}
NEEDS_KUSTOMIZE = pytest.mark.skipif(kustomize_command() is None, reason="neither kubectl nor kustomize is installed")


@cache
def overlay(name: str) -> Manifests:
    return rendered(K8S / "overlays" / name)


def yaml_files() -> list[Path]:
    return sorted(path for path in K8S.rglob("*") if path.suffix in (".yaml", ".yml"))


def strictly_validated(document: Document) -> None:
    """Raise what is wrong. The same document turns up in several overlays, and each look at it is slow."""
    _validated_once(json.dumps(document, sort_keys=True))


@cache
def _validated_once(document: str) -> None:
    kubernetes_validate.validate(json.loads(document), KUBERNETES, strict=True)


def pods_of(manifests: Manifests) -> list[Document]:
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": pod["spec"]} for _, pod in manifests.pods()]


@pytest.mark.parametrize("path", yaml_files(), ids=lambda path: str(path.relative_to(K8S)))
def test_every_file_is_yaml_and_core_kinds_are_complete_where_they_are_no_patches(path: Path) -> None:
    documents = read(path)
    assert documents
    (folder,) = read(path.parent / "kustomization.yaml") if (path.parent / "kustomization.yaml").is_file() else [{}]
    if path.name in folder.get("resources", []) or path.name.endswith(".example.yaml"):
        for document in documents:
            if document["kind"] not in OWN_KINDS:
                strictly_validated(document)


def test_pods_of_the_base_and_its_components_are_valid_without_rendering() -> None:
    for pod in pods_of(composed()):
        strictly_validated(pod)


def test_every_ray_process_runs_with_the_settings_of_leadout_serve() -> None:
    for _, container in composed().ray_containers():
        values = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert RAY_SETTINGS.items() <= values.items()


@pytest.mark.parametrize("file", ["base/serve.yaml", "overlays/a100-l4/serve.yaml"])
def test_a_serve_config_is_accepted_by_serve_and_by_leadout(file: str) -> None:
    ServeDeploySchema.model_validate(yaml.safe_load((K8S / file).read_text()))
    config = parse_config(read_serve_config(K8S / file).arguments)
    assert config.ingress.api_keys_env or config.ingress.api_keys_file


@NEEDS_KUSTOMIZE
@pytest.mark.parametrize("name", OVERLAYS)
class TestOverlay:
    def test_every_lint_passes(self, name: str) -> None:
        manifests = overlay(name)
        found = {lint: check(manifests) for lint, check in LINTS.items()}
        assert {lint: what for lint, what in found.items() if what} == {}

    def test_core_kinds_and_pods_are_strictly_valid(self, name: str) -> None:
        manifests = overlay(name)
        for document in manifests.documents:
            if document["kind"] not in OWN_KINDS:
                strictly_validated(document)
        for pod in pods_of(manifests):
            strictly_validated(pod)

    def test_custom_resources_are_strictly_valid(self, name: str) -> None:
        folder = os.environ.get("LEADOUT_SCHEMAS")
        if not folder:
            pytest.skip("LEADOUT_SCHEMAS does not name a folder with the CRDs' schemas")
        for document in overlay(name).documents:
            if file := SCHEMAS.get(document["kind"]):
                schema = schema_of(Path(folder) / file)
                assert problems(document, schema) == []
                assert problems({**document, "spec": {**document["spec"], "wrong": 1}}, schema) != []

    def test_the_serve_config_in_the_service_is_the_overlays_own_file_word_for_word(self, name: str) -> None:
        own = K8S / "overlays" / name / "serve.yaml"
        text = (own if own.is_file() else K8S / "base" / "serve.yaml").read_text()
        manifests = overlay(name)
        assert manifests.spec["serveConfigV2"] == text
        (job,) = manifests.of_kind("Job")
        env = {entry["name"]: entry for entry in job["spec"]["template"]["spec"]["containers"][0]["env"]}
        assert env["SERVE_CONFIG"]["value"] == text
        ServeDeploySchema.model_validate(manifests.serve_config)
        assert manifests.leadout.target.served_name

    def test_images_carry_a_version(self, name: str) -> None:
        for where, pod in overlay(name).pods():
            for container in pod["spec"]["containers"]:
                tag = container["image"].rsplit("/", 1)[-1].partition(":")[2]
                assert tag not in ("", "latest"), f"{where}: {container['image']}"


@NEEDS_KUSTOMIZE
def test_the_image_is_named_in_one_place(tmp_path: Path) -> None:
    """Changing `images` of an overlay changes every pod that runs Leadout, and nothing else."""
    file = _copy(tmp_path) / "overlays" / "local-cpu" / "kustomization.yaml"
    file.write_text(file.read_text().replace("newName: leadout, newTag: local", "newName: elsewhere/it, newTag: v9"))
    images = [pod["spec"]["containers"][0]["image"] for _, pod in rendered(file.parent).pods()]
    assert images == ["elsewhere/it:v9"] * 4


@NEEDS_KUSTOMIZE
def test_the_models_can_be_fetched_before_anything_else_is_applied() -> None:
    """What carries the label of that step is all that the job needs, but for the namespace and the secrets."""
    documents = rendered(K8S / "base").documents
    step = {"app.kubernetes.io/component": "model-cache"}
    chosen = {d["kind"] for d in documents if step.items() <= d["metadata"].get("labels", {}).items()}
    assert chosen == {"ServiceAccount", "NetworkPolicy", "PersistentVolumeClaim", "Job"}


@NEEDS_KUSTOMIZE
def test_a_changed_serve_config_changes_no_cluster(tmp_path: Path) -> None:
    """Models, replicas and options are applied in place: what would roll the cluster stays as it is."""
    shipped = overlay("a100-l4")
    file = _copy(tmp_path) / "overlays" / "a100-l4" / "serve.yaml"
    file.write_text(file.read_text().replace("max_draft_tokens: 8", "max_draft_tokens: 5"))
    changed = rendered(file.parent)
    assert changed.leadout.speculation.max_draft_tokens == 5
    assert changed.cluster == shipped.cluster


@NEEDS_KUSTOMIZE
def test_a_patch_of_one_group_leaves_the_rest_of_it_and_the_other_groups_alone() -> None:
    """Without the merge keys of kustomize-schema.json a patch would replace the whole list."""
    base: dict[str, Any] = {group["groupName"]: group for group in rendered(K8S / "base").workers}
    patched = {group["groupName"]: group for group in overlay("a100-l4").workers}
    assert patched.keys() == base.keys()
    for name, group in patched.items():
        before, after = (g["template"]["spec"]["containers"][0] for g in (base[name], group))
        assert [mount["mountPath"] for mount in after["volumeMounts"]] == [
            m["mountPath"] for m in before["volumeMounts"]
        ]
        assert {entry["name"] for entry in before["env"]} < {entry["name"] for entry in after["env"]}
        assert after["resources"]["limits"]["nvidia.com/gpu"] == {"draft": "1", "target": "4"}[name]


@NEEDS_KUSTOMIZE
def test_a_pod_gets_traffic_only_while_serve_answers_on_it_and_a_switch_loses_no_stream() -> None:
    """Readiness asks Serve's proxy; a pod that ends drains first; the old cluster outlives its longest request."""
    manifests = overlay("a100-l4")
    for group in manifests.workers:
        container = group["template"]["spec"]["containers"][0]
        assert container["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": "serve"}
        assert container["readinessProbe"]["failureThreshold"] == 1
    for lint in ("pods_drain_before_they_end", "old_clusters_outlive_their_requests", "readiness_follows_serve"):
        assert LINTS[lint](manifests) == []


def _copy(folder: Path) -> Path:
    return Path(shutil.copytree(K8S, folder / "k8s"))
