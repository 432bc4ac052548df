"""Who may import whom."""

import subprocess
import sys

from benchmarks.harness import ROOT


def test_imports_point_one_way_and_only_workers_and_deployments_know_ray() -> None:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert outcome.returncode == 0, outcome.stdout
    assert "0 broken" in outcome.stdout


def test_decoding_and_engine_import_without_ray_and_bitsandbytes() -> None:
    program = (
        "import sys\n"
        "sys.modules['ray'] = sys.modules['bitsandbytes'] = None\n"
        "import workers.decoding.sampling, workers.decoding.stopping, workers.decoding.verification\n"
        "import workers.engine.verifier, workers.engine.pair, workers.drafters.model_drafter\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


def test_router_ingress_and_autoscaling_policies_import_without_torch() -> None:
    program = (
        "import sys\n"
        "import workers.router.actor, deployments.http_app, deployments.autoscaling_policy\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)
