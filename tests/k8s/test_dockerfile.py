"""The image: pinned, without root, with every package of ours that is imported."""

import ast
import re
from importlib.metadata import version

import pytest

from tests.k8s.manifests import K8S, ROOT, composed

LINES = re.sub(r"\\\n", " ", (K8S / "Dockerfile").read_text()).splitlines()
PACKAGES = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}


def imported_by(package: str) -> set[str]:
    """The first names of what any module of `package` imports."""
    found: set[str] = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found


def test_ray_is_the_same_in_the_image_the_manifests_the_pins_and_here() -> None:
    (image,) = [line for line in LINES if line.startswith("ARG RAY_IMAGE=")]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert image.startswith(f"ARG RAY_IMAGE=rayproject/ray:{pins['ray']}-py3")
    assert composed().cluster["rayVersion"] == pins["ray"] == version("ray")


def test_every_stage_starts_from_the_pinned_image_and_the_last_one_is_not_root() -> None:
    assert {line.split()[1] for line in LINES if line.startswith("FROM ")} == {"${RAY_IMAGE}"}
    last_user = [line for line in LINES if line.startswith("USER ")][-1]
    pods = {pod["spec"]["securityContext"]["runAsUser"] for name, pod in composed().pods() if "redis" not in name}
    assert pods == {int(last_user.split()[1].split(":")[0])} == {1000}


def test_dependencies_come_as_wheels_in_pinned_versions_and_only_in_the_first_stage() -> None:
    installs = [number for number, line in enumerate(LINES) if "pip install" in line]
    last_stage = max(number for number, line in enumerate(LINES) if line.startswith("FROM "))
    assert installs and max(installs) < last_stage
    for number in installs:
        assert "--constraint constraints.txt" in LINES[number] and "--only-binary :all:" in LINES[number]


@pytest.mark.parametrize("package", ["deployments", "workers"])
def test_what_our_packages_import_of_each_other_is_in_the_image(package: str) -> None:
    copied = {line.split()[1].split("/")[0] for line in LINES if line.startswith("COPY ") and "--from" not in line}
    assert package in copied
    assert imported_by(package) & PACKAGES <= copied
    allowed = (K8S / "Dockerfile.dockerignore").read_text()
    assert all(f"!{name}\n" in allowed for name in copied & (PACKAGES | {"models"}))
