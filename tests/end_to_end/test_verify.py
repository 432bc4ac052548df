"""`leadout verify` and the online check against real models."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import ROOT, Service


def test_leadout_verify_finds_the_service_lossless(service: Service, prompts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts[:6]))
    options = ["--url", service.url, "--output", "json", "--max-tokens", "24"]
    command = [sys.executable, "-m", "deployments.cli", "verify", str(path), *options]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    assert json.loads(told.stdout)["verdict"].startswith("LOSSLESS: 12 answers")
