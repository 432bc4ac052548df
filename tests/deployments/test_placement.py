"""Every deployment is placed on the nodes that its section names, and anywhere where it names none."""

from typing import Any

import pytest
from ray._private.label_utils import validate_label_selector
from ray._raylet import node_labels_match_selector

from deployments.app import wire
from deployments.config import parse_config
from deployments.preflight import ServedModel

MODEL = ServedModel(tokenizer_json="{}", vocabulary_size=10, context_length=32)
ON_TARGETS, ON_DRAFTS = {"leadout/role": "target"}, {"leadout/role": "draft"}
OFF_THE_HEAD = {"leadout/role": "!in(draft,head)"}


def placements(**sections: Any) -> dict[str, Any]:
    """Return Serve's replica configuration of each deployment, by name."""
    drafters = [{"name": "small", "model": "m", **sections.pop("drafter", {})}]
    config = {"target": {"model": "m", **sections.pop("target", {})}, "drafters": drafters, **sections}
    return {name: deployment._replica_config for name, deployment in deployed(config).items()}


def deployed(config: dict[str, Any]) -> dict[str, Any]:
    """Return the application's deployments by name."""
    found: dict[str, Any] = {}

    def collect(application: Any) -> None:
        deployment = application._bound_deployment
        found[deployment.name] = deployment
        for argument in deployment.init_args:
            for bound in argument if isinstance(argument, list) else [argument]:
                if hasattr(bound, "_bound_deployment"):
                    collect(bound)

    collect(wire(parse_config(config), MODEL))
    return found


def test_every_bundle_of_a_worker_and_the_actors_without_a_bundle_ask_for_the_labels_of_their_section() -> None:
    placed = placements(
        target={"tensor_parallel_size": 4, "num_gpus": 1, "node_labels": ON_TARGETS},
        drafter={"node_labels": ON_DRAFTS},
        router={"node_labels": OFF_THE_HEAD},
        ingress={"node_labels": ON_TARGETS},
    )
    assert placed["TargetPool"].placement_group_bundle_label_selector == [ON_TARGETS] * 4
    assert placed["TargetPool"].placement_group_strategy == "STRICT_PACK"
    assert placed["DraftPool-small"].placement_group_bundle_label_selector == [ON_DRAFTS]
    assert placed["Router"].ray_actor_options["label_selector"] == OFF_THE_HEAD
    assert placed["Ingress"].ray_actor_options["label_selector"] == ON_TARGETS


def test_each_of_several_routers_has_pools_of_its_own_with_its_share_of_the_replicas() -> None:
    config = {
        "target": {"model": "m", "replicas": 3},
        "drafters": [{"name": "a", "model": "m", "replicas": 6}, {"name": "b", "model": "m"}],
        "router": {"replicas": 2},
    }
    found = deployed(config)
    assert {name: each.num_replicas for name, each in found.items()} == {
        "Router-0": 1, "Router-1": 1, "TargetPool-0": 2, "TargetPool-1": 1,
        "DraftPool-a-0": 4, "DraftPool-a-1": 2, "DraftPool-b-0": 1, "Ingress": 1,
    }  # fmt: skip
    for name, each in found.items():
        if "Pool" in name:
            router = each.init_args[1]._bound_deployment
            assert router.name == f"Router-{name[-1]}"


def test_without_labels_every_node_will_do() -> None:
    for replica in placements().values():
        assert not replica.placement_group_bundle_label_selector
        assert not replica.ray_actor_options.get("label_selector")


@pytest.mark.parametrize(
    ("selector", "roles"),
    [
        ("target", {"target"}),
        ("!draft", {"target", "head", None}),
        ("in(draft, target)", {"draft", "target"}),
        ("!in(draft, head)", {"target", None}),
        ("!in(draft,head)", {"target", None}),
    ],
)
def test_ray_takes_a_selector_as_it_is_meant(selector: str, roles: set[str | None]) -> None:
    config = parse_config({"target": {"model": "m", "node_labels": {"leadout/role": selector}}})
    chosen = config.target.node_labels
    assert validate_label_selector(chosen) is None
    nodes = {role: {} if role is None else {"leadout/role": role} for role in ("draft", "target", "head", None)}
    assert {role for role, labels in nodes.items() if node_labels_match_selector(labels, chosen)} == roles
