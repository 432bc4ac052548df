"""`leadout plan`: what it prints for large models on GPUs and for the embedded pair, and how it ends."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from deployments.cli import cli

TINY = Path("deployments/tiny-code.yaml")
ON_GPUS = ("--accelerator", "target=A100-80GB", "--accelerator", "small=L4")


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)])


def as_json(*arguments: object) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(invoke(*arguments, "--json").stdout)
    return content


def large(folder: Path, target: dict[str, Any] | None = None, drafter: dict[str, Any] | None = None) -> Path:
    """70B over four GPUs, and two drafters of 1B."""
    common = {"num_gpus": 1.0, "max_context_tokens": 8192}
    first = {"model": "meta-llama/Llama-3.1-70B-Instruct", "tensor_parallel_size": 4, "kv_cache_gib": 24.0}
    second = {"model": "meta-llama/Llama-3.2-1B", "name": "small", "quantization": "int8", "kv_cache_gib": 8.0}
    args = {"target": {**common, **first, **(target or {})}}
    args["drafters"] = [{**common, **second, "replicas": 2, **(drafter or {})}]  # type: ignore[assignment]
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump({"applications": [{"import_path": "deployments.app:build_app", "args": args}]}))
    return path


def test_70b_on_a100s_with_1b_on_l4s(tmp_path: Path) -> None:
    path = large(tmp_path)
    result = invoke(path, *ON_GPUS)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "FITS: 4 x A100-80GB, 2 x L4"
    plan = as_json(path, *ON_GPUS, "--acceptance", 0.8)
    target, drafter = plan["roles"]
    assert (target["gpus"], drafter["gpus"]) == (4, 2)
    assert target["memory_per_process"]["weights"] == pytest.approx(35.3e9, rel=0.01)
    assert target["memory_per_process"]["kv_token_bytes"] == 80 * 2 * 2 * 128 * 2
    assert drafter["memory_per_process"]["weights"] == pytest.approx(1.5e9, rel=0.01)
    assert target["step_origin"] == "roofline"
    assert "sizes of Llama-3.1-70B are from a table" in " ".join(plan["warnings"])


def test_the_overlay_for_a100s_and_l4s_fits_and_its_drafter_pays_at_every_load() -> None:
    overlay = "k8s/overlays/a100-l4/serve.yaml"
    accelerators = ("--accelerator", "target=A100-80GB", "--accelerator", "llama-3.2-1b=L4")
    assert invoke(overlay, *accelerators).stdout.splitlines()[-1] == "FITS: 4 x A100-80GB, 2 x L4"
    (pair,) = as_json(overlay, *accelerators)["drafters"]
    assert all(row["ahead"]["speed_up"] > 1.5 for row in pair["expected"])


def test_measured_times_and_acceptance_go_into_the_formula(tmp_path: Path) -> None:
    times = ("--target-step-ms", 30, "--draft-step-ms", "small=4", "--acceptance", 0.8, "--hit", 1.0)
    plan = as_json(large(tmp_path), *ON_GPUS, *times)
    row = plan["drafters"][0]["expected"][0]
    assert [each["step_origin"] for each in plan["roles"]] == ["given", "given"]
    assert row["ahead"]["draft_tokens"] == 7
    assert row["ahead"]["speed_up"] == pytest.approx((1 - 0.8**8) / 0.2, rel=0.01)
    assert row["in_turn"]["speed_up"] == pytest.approx((1 - 0.8**6) / 0.2 / (1 + 5 * 4 / 30), rel=0.01)
    assert row["break_even"] == pytest.approx(4 / 30, rel=0.01)
    assert plan["drafters"][0]["replicas_kept_busy"] == 1
    # Two targets, each keeping one drafter busy for most of its time, and one drafter configured.
    few = large(tmp_path, {"replicas": 2}, {"replicas": 1})
    text = " ".join(as_json(few, *ON_GPUS, *times)["warnings"])
    assert "drafter small: the targets would keep 2 replicas busy, and 1 are configured" in text
    slow = as_json(few, *ON_GPUS, "--target-step-ms", 30, "--draft-step-ms", "small=90")
    assert "drafter small does not pay at any load" in slow["warnings"]


def test_it_says_what_each_of_several_routers_gets(tmp_path: Path) -> None:
    path = large(tmp_path, {"replicas": 3}, {"replicas": 1})
    content = yaml.safe_load(path.read_text())
    content["applications"][0]["args"]["router"] = {"replicas": 2}
    path.write_text(yaml.safe_dump(content))
    notes = as_json(path, *ON_GPUS)["warnings"]
    assert "2 routers share the replicas: target 2 + 1; small 1 + 0" in notes
    assert any("drafter small: 1 of 2 routers have none" in note for note in notes)


def test_labels_name_the_accelerator_and_keep_roles_apart(tmp_path: Path) -> None:
    label = "ray.io/accelerator-type"
    path = large(tmp_path, {"node_labels": {label: "H100"}}, {"node_labels": {label: "L4"}})
    plan = as_json(path)
    assert plan["gpus"] == {"H100": 4, "L4": 2}
    assert not [line for line in plan["warnings"] if "each other's GPUs" in line]
    (problem,) = as_json(path, "--accelerator", "target=H200")["problems"]
    assert problem == f"target.node_labels: {label} is H100, and Ray's name of H200 is H200"
    assert [line for line in as_json(large(tmp_path), *ON_GPUS)["warnings"] if "each other's GPUs" in line]


def test_emulated_times_are_taken_as_they_are(tmp_path: Path) -> None:
    path = large(
        tmp_path, {"emulated": {"base_ms": 30.0, "token_ms": 0.5}}, {"emulated": {"step_ms": 4.0, "row_ms": 0.0}}
    )
    plan = as_json(path, *ON_GPUS)
    assert [each["step_origin"] for each in plan["roles"]] == ["emulated", "emulated"]
    assert plan["roles"][0]["step_ms"] == 30.5


def test_a_form_that_is_chosen_later_counts_as_the_largest(tmp_path: Path) -> None:
    plan = as_json(large(tmp_path, drafter={"quantization": "auto"}), *ON_GPUS)
    assert plan["roles"][1]["memory_per_process"]["weights"] == pytest.approx(2 * 1_235_814_400)
    assert "drafters[0].quantization: auto is counted as none, the largest form" in plan["warnings"]


def test_too_little_memory_ends_with_one_and_says_what_would_do(tmp_path: Path) -> None:
    path = large(tmp_path)
    result = invoke(path, "--accelerator", "target=A100-40GB", "--accelerator", "small=L4")
    assert result.exit_code == 1
    line = result.stdout.splitlines()[-1]
    assert line.startswith("DOES NOT FIT: target does not fit on 4 x A100-40GB for Llama-3.1-70B in bfloat16 at TP 4: ")
    assert "4 x A100-80GB" in line.split("Would fit: ")[1]


def test_machines_are_checked_where_they_are_named(tmp_path: Path) -> None:
    path = large(tmp_path)
    fits = as_json(path, *ON_GPUS, "--node", "2xL4", "--node", "4xA100-80GB")
    assert fits["problems"] == []
    assert {(each["role"], each["node"]) for each in fits["placement"]} == {
        ("target", "node 2 (4xA100-80GB)"),
        ("drafters[0]", "node 1 (2xL4)"),
    }
    result = invoke(path, *ON_GPUS, "--node", "2xL4", "--node", "2xA100-80GB", "--node", "2xA100-80GB")
    assert result.exit_code == 1
    assert "DOES NOT FIT: target: no node for replica 1 of 1, which needs GPU 4 on one node" in result.stdout


def test_the_embedded_pair_runs_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(TINY)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "FITS: no GPUs"
    plan = as_json(TINY)
    assert plan["gpus"] == {}
    target, drafter = plan["roles"]
    assert target["memory_per_process"]["kv_token_bytes"] == 2 * 8 * 4 * 32 * 4
    assert target["memory_per_process"]["kv_tokens"] == 65_536
    assert (target["parameters"], drafter["parameters"]) == (7_344_384, 1_016_448)
    assert target["memory_per_process"]["available"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "target: which GPU? Give --accelerator target=NAME"),
        (("--accelerator", "target=A100"), "target: accelerator A100 may be A100-40GB or A100-80GB"),
        ((*ON_GPUS, "--accelerator", "other=L4"), "--accelerator other: not one of target, small"),
        (("--accelerator", "L4"), "--accelerator L4: write ROLE=NAME"),
        ((*ON_GPUS, "--draft-step-ms", "small=fast"), "--draft-step-ms small=fast: write DRAFTER=MS"),
        ((*ON_GPUS, "--node", "L4"), "--node L4: "),
        ((*ON_GPUS, "--node", "2xL4,drafts"), "--node 2xL4,drafts: write COUNTxNAME"),
    ],
)
def test_what_cannot_be_planned_ends_with_two_and_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    result = invoke(large(tmp_path), *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"leadout: {message}"), result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_model_whose_sizes_are_nowhere_is_named(tmp_path: Path) -> None:
    result = invoke(large(tmp_path, {"model": "somebody/unheard-of"}), *ON_GPUS)
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "leadout: target.model: the config.json of somebody/unheard-of is not on this machine (`hf download"
    )
    folder = tmp_path / "odd"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    result = invoke(large(tmp_path, {"model": str(folder)}), *ON_GPUS)
    assert result.exit_code == 2 and "target.model: model odd: sizes of model type mamba are not known" in result.stderr
