"""A configuration is accepted whole or refused by the name of what is wrong."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.harness import ROOT, tiny_pair_config
from deployments.config import LeadoutConfig, parse_config
from deployments.local_cluster import logical_cpus
from deployments.preflight import resolve_models
from deployments.serve_config import read_serve_config
from workers.errors import ConfigurationError

SHIPPED = ROOT / "deployments" / "tiny-code.yaml"


def arguments(**changes: Any) -> dict[str, Any]:
    """The shipped arguments with other sections."""
    shipped: dict[str, Any] = tiny_pair_config()["applications"][0]["args"]
    return shipped | changes


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_the_shipped_file_is_valid_and_its_models_are_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = resolve_models(parse_config(read_serve_config(SHIPPED).arguments))
    assert Path(config.target.model).is_absolute()
    assert Path(config.drafters[0].model).is_absolute()


def test_only_the_target_is_needed_and_its_name_is_the_last_part_of_the_model() -> None:
    config = parse_config({"target": {"model": "Qwen/Qwen2.5-Coder-7B-Instruct"}})
    assert config.target.served_name == "Qwen2.5-Coder-7B-Instruct"
    assert config.drafters == []
    assert config.router_config().max_draft_tokens == config.speculation.max_draft_tokens


def test_the_router_is_told_how_much_to_draft_and_to_check() -> None:
    section = {"max_draft_tokens": 3, "check_share": 0.25, "check_max_pending": 5, "check_timeout_s": 2.5}
    config = parse_config({"target": {"model": "m"}, "speculation": section}).router_config()
    assert {name: getattr(config, name) for name in section} == section
    assert parse_config({"target": {"model": "m"}}).router_config().check_share == 0


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"drafter": []}, "drafter"),
        ({"target": {}}, "target.model"),
        ({"target": {"model": "m", "dtype": "int3"}}, "target.dtype"),
        ({"target": {"model": "m", "replicas": 0}}, "target.replicas"),
        ({"router": {"replicas": 0}}, "router.replicas"),
        ({"router": {"replicas": 2}}, "target.replicas 1 is below router.replicas 2"),
        (
            {"target": {"model": "m", "autoscaling": {"max_replicas": 4}}, "router": {"replicas": 2}},
            "target.autoscaling.min_replicas 1 is below router.replicas 2",
        ),
        ({"target": {"model": "m", "kv_cache_gib": "1"}}, "target.kv_cache_gib"),
        ({"target": {"model": "m", "kv_cache_gib": -1}}, "target.kv_cache_gib"),
        ({"target": {"model": "m", "num_cpus": 0}}, "num_gpus"),
        ({"target": {"model": "m", "quantization": "int3"}}, "target.quantization"),
        ({"target": {"model": "m", "quantization": "auto"}}, "target: Value error, quantization auto"),
        ({"target": {"model": "m", "quantization": "nf4", "tensor_parallel_size": 2}}, "tensor_parallel_size 2"),
        ({"target": {"model": "m", "trust_remote_code": "yes"}}, "target.trust_remote_code"),
        ({"drafters": [{"model": "m", "name": "a", "quantization": "fp8"}]}, "drafters[0].quantization"),
        ({"speculation": {"max_draft_tokens": 33}}, "speculation.max_draft_tokens"),
        ({"speculation": {"max_draft_tokens": True}}, "speculation.max_draft_tokens"),
        ({"speculation": {"check_share": 1.01}}, "speculation.check_share"),
        ({"speculation": {"check_share": -0.1}}, "speculation.check_share"),
        ({"speculation": {"check_max_pending": 0}}, "speculation.check_max_pending"),
        ({"speculation": {"check_timeout_s": 0}}, "speculation.check_timeout_s"),
        ({"router": {"max_running": 4}}, "router.max_running"),
        ({"router": {"verify_deadline_s": 0}}, "router.verify_deadline_s"),
        ({"router": {"prefill_latency_factor": 1.0}}, "router.prefill_latency_factor"),
        ({"router": {"link": "tcp"}}, "router.link"),
        ({"target": {"model": "m", "node_labels": {"leadout/role": "a b"}}}, "target.node_labels"),
        ({"target": {"model": "m", "node_labels": {"/role": "target"}}}, "target.node_labels"),
        ({"router": {"node_labels": {"leadout/role": "in()"}}}, "router.node_labels"),
        ({"ingress": {"node_labels": {"leadout/role": "not(a)"}}}, "ingress.node_labels"),
        ({"drafters": [{"model": "m"}]}, "drafters[0].name"),
        ({"drafters": [{"model": "m", "name": "a b"}]}, "drafters[0].name"),
        ({"drafters": [{"model": "m", "name": "a", "kind": "magic"}]}, "drafters[0].kind"),
        ({"drafters": [{"model": "m", "name": "a"}, {"model": "n", "name": "a"}]}, "'a'"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        parse_config(arguments(**changes))
    assert key in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("applications: [", "not YAML"),
        ("just text", "applications"),
        ({"applications": []}, "exactly one"),
        ({"applications": [{"import_path": "other:app", "args": {}}]}, "import_path"),
        ({"applications": [{"import_path": "deployments.app:build_app"}]}, "args"),
        (tiny_pair_config() | {"http_option": {}}, "http_option"),
        (tiny_pair_config() | {"http_options": {"prt": 1}}, "http_options.prt"),
        (tiny_pair_config() | {"http_options": {"port": 0}}, "http_options.port"),
    ],
)
def test_a_file_that_is_no_serve_config_is_refused_in_one_line(tmp_path: Path, content: Any, named: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        read_serve_config(written(tmp_path, content))
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.yaml"):
        read_serve_config(tmp_path / "nowhere.yaml")


def test_ray_is_told_of_as_many_cpus_as_the_workers_ask_for() -> None:
    config: LeadoutConfig = parse_config(arguments(target={"model": "m", "tensor_parallel_size": 16, "num_cpus": 4.0}))
    assert logical_cpus(config) >= 65


def test_what_says_how_to_load_reaches_the_engine() -> None:
    keys = {"quantization": "int8", "allow_pickled_weights": True, "trust_remote_code": True}
    config = parse_config({"target": {"model": "m", **keys}, "drafters": [{"model": "m", "name": "a", **keys}]})
    for engine in (config.target.engine_config(), config.drafters[0].spec().engine):
        assert {name: getattr(engine, name) for name in keys} == keys
    plain = parse_config({"target": {"model": "m"}}).target.engine_config()
    assert (plain.quantization, plain.allow_pickled_weights, plain.trust_remote_code) == ("none", False, False)
    auto = parse_config({"target": {"model": "m"}, "drafters": [{"model": "m", "name": "a", "quantization": "auto"}]})
    assert auto.drafters[0].engine_config().quantization == "auto"


def test_a_gguf_file_is_found_in_the_project_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.gguf").touch()
    monkeypatch.setattr("deployments.preflight.PROJECT_ROOT", tmp_path)
    assert resolve_models(parse_config({"target": {"model": "tiny.gguf"}})).target.model == str(tmp_path / "tiny.gguf")


def test_prefix_caching_is_on_unless_switched_off_for_a_worker() -> None:
    drafters = [{"name": "draft", "model": "small", "prefix_caching": False}]
    config = parse_config({"target": {"model": "large"}, "drafters": drafters})
    assert config.target.engine_config().prefix_caching
    assert not config.drafters[0].spec().engine.prefix_caching
