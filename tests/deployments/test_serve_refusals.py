"""What `leadout serve` refuses before it starts anything: one line that names the key, and status 2."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.harness import ROOT, tiny_pair_config
from deployments.cli import cli

REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "an unknown key": (lambda args: args.update(spectulation={}), "spectulation"),
    "an unknown nested key": (lambda args: args["target"].update(tensor_paralel=2), "target.tensor_paralel"),
    "an impossible value": (lambda args: args["speculation"].update(max_draft_tokens=-1), "max_draft_tokens"),
    "a missing model": (lambda args: args["target"].update(model="models/nowhere"), "models/nowhere"),
    "ranks that do not divide the heads": (lambda args: args["target"].update(tensor_parallel_size=3), "3"),
    "a drafter with another tokenizer": (
        lambda args: args["drafters"][0].update(model="OTHER_TOKENIZER"),
        "different tokenizers",
    ),
    "a KV pool that holds no context": (
        lambda args: args["target"].update(kv_cache_gib=0.0001),
        "target.kv_cache_gib 0.0001 is too small: one context of 1024 tokens needs 0.00781 GiB",
    ),
    "a drafter's KV pool that holds no context": (
        lambda args: args["drafters"][0].update(kv_cache_gib=0.0001),
        "drafters[0].kv_cache_gib 0.0001 is too small",
    ),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_configuration_is_refused_in_one_line(
    change: tuple[Callable[[dict[str, Any]], None], str], tmp_path: Path
) -> None:
    alter, named = change
    config = tiny_pair_config()
    alter(config["applications"][0]["args"])
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config).replace("OTHER_TOKENIZER", str(permuted_drafter(tmp_path))))
    outcome = CliRunner().invoke(cli, ["serve", str(path)])
    assert outcome.exit_code == 2
    (complaint,) = [line for line in outcome.stderr.splitlines() if line.startswith("leadout: ")]
    assert named in complaint
    assert "Traceback" not in outcome.stderr
    assert outcome.stdout == ""


def permuted_drafter(folder: Path) -> Path:
    """The drafter's files with two token ids exchanged: as many tokens, other meanings."""
    copy = folder / "permuted"
    shutil.copytree(ROOT / "models" / "tiny-code" / "draft", copy)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    return copy
