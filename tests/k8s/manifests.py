"""The manifests as documents: rendered by kustomize, or put together here from what needs no merge of lists."""

import copy
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from deployments.config import LeadoutConfig, parse_config
from tests.limits import HANG_S

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
Document = dict[str, Any]


@dataclass(frozen=True)
class Manifests:
    """What would be applied, and the Dockerfile of the image that it names."""

    documents: list[Document]
    dockerfile: str

    def of_kind(self, kind: str) -> list[Document]:
        return [document for document in self.documents if document["kind"] == kind]

    def one(self, kind: str, name: str) -> Document:
        (found,) = [document for document in self.of_kind(kind) if document["metadata"]["name"] == name]
        return found

    @property
    def service(self) -> Document:
        (service,) = self.of_kind("RayService")
        return service

    @property
    def spec(self) -> Document:
        return self.service["spec"]

    @property
    def cluster(self) -> Document:
        return self.spec["rayClusterConfig"]

    @property
    def head(self) -> Document:
        return self.cluster["headGroupSpec"]

    @property
    def workers(self) -> list[Document]:
        return self.cluster["workerGroupSpecs"]

    @property
    def groups(self) -> list[Document]:
        return [self.head, *self.workers]

    @property
    def serve_config(self) -> Document:
        return yaml.safe_load(self.spec["serveConfigV2"])

    @cached_property
    def leadout(self) -> LeadoutConfig:
        return parse_config(self.serve_config["applications"][0]["args"])

    def pods(self) -> Iterator[tuple[str, Document]]:
        """Every pod template, with a name for messages."""
        for group in self.groups:
            yield f"group {group.get('groupName', 'head')}", group["template"]
        for kind in ("Job", "Deployment", "StatefulSet"):
            for document in self.of_kind(kind):
                yield f"{kind} {document['metadata']['name']}", document["spec"]["template"]

    def ray_containers(self) -> Iterator[tuple[str, Document]]:
        """The container that runs Ray in each group."""
        for group in self.groups:
            yield group.get("groupName", "head"), group["template"]["spec"]["containers"][0]

    def changed(self) -> "Manifests":
        """A copy to plant faults in."""
        return Manifests(copy.deepcopy(self.documents), self.dockerfile)


def kustomize_command() -> list[str] | None:
    """How kustomize is called here; None where there is none."""
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    return ["kustomize", "build"] if shutil.which("kustomize") else None


def rendered(folder: Path) -> Manifests:
    """What kustomize makes of `folder`. CalledProcessError, with its words, if it refuses."""
    command = kustomize_command()
    assert command is not None
    output = subprocess.run([*command, str(folder)], check=True, capture_output=True, text=True, timeout=HANG_S).stdout
    return Manifests(list(yaml.safe_load_all(output)), (K8S / "Dockerfile").read_text())


def read(path: Path) -> list[Document]:
    """The documents of a file."""
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def composed() -> Manifests:
    """The base with the components that patch nothing in lists: gcs-ft, gateway and incremental-upgrade."""
    documents: list[Document] = []
    folders = [K8S / "base", *(K8S / "components" / name for name in ("gcs-ft", "gateway", "incremental-upgrade"))]
    for folder in folders:
        (kustomization,) = read(folder / "kustomization.yaml")
        for resource in kustomization.get("resources", []):
            documents += read(folder / resource)
        for patch in kustomization.get("patches", []):
            if "target" not in patch:
                (change,) = read(folder / patch["path"])
                _merge(_same(documents, change), change)
    serve = (K8S / "base" / "serve.yaml").read_text()
    for document in documents:
        if document["kind"] == "RayService":
            document["spec"]["serveConfigV2"] = serve
        if document["kind"] == "Job":
            (variable,) = [
                entry
                for entry in document["spec"]["template"]["spec"]["containers"][0]["env"]
                if entry["name"] == "SERVE_CONFIG"
            ]
            variable["value"] = serve
    # Anchors make several places one object; a fault must be planted in one of them.
    separate = [yaml.safe_load(yaml.dump(document, Dumper=_WithoutAliases)) for document in documents]
    return Manifests(separate, (K8S / "Dockerfile").read_text())


class _WithoutAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _same(documents: list[Document], change: Document) -> Document:
    def identity(document: Document) -> tuple[str, str]:
        return document["kind"], document["metadata"]["name"]

    return next(document for document in documents if identity(document) == identity(change))


def _merge(target: Document, change: Document) -> None:
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value
