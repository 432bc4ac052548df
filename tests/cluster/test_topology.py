"""Roles become requests to Ray, and are placed on machines that have the labels and the room."""

from dataclasses import replace

import pytest

from cluster.accelerators import CATALOGUE, accelerator
from cluster.errors import PlanError
from cluster.topology import Node, Role, place, role_problems, topology_warnings

TARGET = Role("target", CATALOGUE["A100-80GB"], 1, 4, 1.0, 1.0, {"pool": "targets"})
DRAFTER = Role("drafters[0]", CATALOGUE["L4"], 2, 1, 1.0, 1.0, {"pool": "drafts"})
BIG = Node("big", {"pool": "targets"}, {"CPU": 8.0, "GPU": 4.0})
SMALL = [Node(f"small{index}", {"pool": "drafts"}, {"CPU": 4.0, "GPU": 1.0}) for index in range(2)]


def test_each_replica_is_a_group_of_bundles_on_one_node() -> None:
    assert TARGET.bundles == [{"CPU": 1.0, "GPU": 1.0}] * 4
    placement = place([DRAFTER, TARGET], [*SMALL, BIG])
    assert placement.problems == ()
    assert placement.replicas == (("target", "big"), ("drafters[0]", "small0"), ("drafters[0]", "small1"))


def test_ranks_are_not_spread_and_labels_are_kept() -> None:
    halves = [Node(f"half{index}", {"pool": "targets"}, {"CPU": 8.0, "GPU": 2.0}) for index in range(2)]
    (line,) = place([TARGET], halves).problems
    assert line.startswith("target: no node for replica 1 of 1, which needs CPU 4, GPU 4 on one node: half0 has ")
    assert place([TARGET], SMALL).problems == ("target: no node with the labels pool=targets",)
    (line,) = place([replace(DRAFTER, replicas=3)], [*SMALL, BIG]).problems
    assert line.startswith("drafters[0]: no node for replica 3 of 3")


def test_small_replicas_leave_whole_machines_to_large_ones() -> None:
    anywhere = replace(DRAFTER, labels={}, replicas=2)
    two = replace(TARGET, labels={}, ranks=4)
    placement = place([anywhere, two], [BIG, *SMALL])
    assert placement.problems == () and ("target", "big") in placement.replicas


def test_shared_gpus_are_counted_whole() -> None:
    assert TARGET.gpus == 4
    assert replace(DRAFTER, replicas=3, num_gpus=0.5).gpus == 2
    assert replace(DRAFTER, replicas=3, num_gpus=0.0).gpus == 0
    assert replace(DRAFTER, replicas=5, num_gpus=0.4).gpus == 3  # two share one, a third finds no room


def test_roles_that_cannot_be_are_named_by_their_keys() -> None:
    def only(role: Role) -> str:
        (line,) = role_problems(role)
        return line

    assert list(role_problems(TARGET)) == []
    assert only(replace(TARGET, num_gpus=0.0)) == "target.num_gpus: 0, and A100-80GB is a GPU; set 1"
    assert only(replace(DRAFTER, accelerator=CATALOGUE["CPU"])).startswith("drafters[0].num_gpus: 1, and its ")
    assert only(replace(TARGET, ranks=16)).startswith("target.tensor_parallel_size: the 16 ranks of a replica share")
    wrong = replace(TARGET, labels={"ray.io/accelerator-type": "L4"})
    assert only(wrong).endswith("ray.io/accelerator-type is L4, and Ray's name of A100-80GB is A100")


def test_roles_that_could_take_each_others_gpus_are_warned_about() -> None:
    assert list(topology_warnings([TARGET, DRAFTER])) == []
    (line,) = topology_warnings([TARGET, replace(DRAFTER, labels={})])
    assert line.startswith("target (A100-80GB) and drafters[0] (L4) may be placed on each other's GPUs")
    assert list(topology_warnings([TARGET, replace(DRAFTER, labels={}, replicas=0)])) == []


@pytest.mark.parametrize(
    ("selector", "takes_a", "takes_none"),
    [
        ("a", True, False),
        ("in(b, a)", True, False),
        ("!a", False, True),
        ("!in(a, b)", False, True),
        ("!b", True, True),
    ],
)
def test_labels_are_selected_as_ray_does(selector: str, takes_a: bool, takes_none: bool) -> None:
    role = replace(DRAFTER, replicas=1, labels={"pool": selector})
    for labels, taken in (({"pool": "a"}, takes_a), ({}, takes_none)):
        assert bool(place([role], [Node("node", labels, {"CPU": 1.0, "GPU": 1.0})]).replicas) is taken
    target = replace(TARGET, labels={"pool": "a"})
    assert bool(list(topology_warnings([target, role]))) is takes_a


def test_accelerators_are_found_by_either_name() -> None:
    assert accelerator("L4") is CATALOGUE["L4"]
    with pytest.raises(PlanError, match="A100 may be A100-40GB or A100-80GB"):
        accelerator("A100")
    with pytest.raises(PlanError, match="'B12' is not one of A100-40GB"):
        accelerator("B12")


def test_names_are_those_of_ray() -> None:
    from ray.util.accelerators import accelerators

    known = {value for name, value in vars(accelerators).items() if name.startswith("NVIDIA_")}
    assert {each.ray_type for each in CATALOGUE.values() if each.is_gpu} <= known
