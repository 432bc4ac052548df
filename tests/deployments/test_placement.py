"""Every deployment is placed on the nodes that its section names, and anywhere where it names none."""

from typing import Any

import pytest
from ray._private.label_utils import validate_label_selector

from deployments.app import wire
from deployments.config import parse_config
from deployments.preflight import ServedModel

MODEL = ServedModel(tokenizer_json="{}", vocabulary_size=10, context_length=32)
ON_TARGETS, ON_DRAFTS = {"leadout/role": "target"}, {"leadout/role": "draft"}
OFF_THE_HEAD = {"leadout/role": "!in(draft, head)"}


def placements(**sections: Any) -> dict[str, Any]:
    """Return Serve's replica configuration of each deployment, by name."""
    drafters = [{"name": "small", "model": "m", **sections.pop("drafter", {})}]
    config = parse_config({"target": {"model": "m", **sections.pop("target", {})}, "drafters": drafters, **sections})
    found: dict[str, Any] = {}

    def collect(application: Any) -> None:
        deployment = application._bound_deployment
        found[deployment.name] = deployment._replica_config
        for argument in deployment.init_args:
            for bound in argument if isinstance(argument, list) else [argument]:
                if hasattr(bound, "_bound_deployment"):
                    collect(bound)

    collect(wire(config, MODEL))
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


def test_without_labels_every_node_will_do() -> None:
    for replica in placements().values():
        assert not replica.placement_group_bundle_label_selector
        assert not replica.ray_actor_options.get("label_selector")


@pytest.mark.parametrize("selector", ["target", "!draft", "in(draft, target)", "!in(draft,head)", "a.b-c_1"])
def test_what_is_accepted_here_is_accepted_by_ray(selector: str) -> None:
    labels = {"leadout/role": selector, "ray.io/accelerator-type": "A100"}
    assert parse_config({"target": {"model": "m", "node_labels": labels}}).target.node_labels == labels
    assert validate_label_selector(labels) is None
