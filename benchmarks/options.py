"""Every sampling option x {coupled, by ratio} x {streamed, not} x drafters: how many answers are plain decoding's.

`make bench BENCH=options` asks with several seeds at temperatures 0 and 0.8 (about ten minutes), `QUICK=1` with one
seed. The whole application in one process, with tiny float32 models: drafters with the target's own weights, with noise
added to them, and with random ones. By ratio only greedy answers are bound to be equal.
"""

import argparse
import tempfile
from pathlib import Path

from starlette.testclient import TestClient

from benchmarks.harness import Row, report
from deployments.text import TextCodec
from tests.in_process import DRAFTER_NOISE, InProcessService, application, load, save_byte_llama, save_drafters
from tests.losslessness.asking import OFF, Answer, ask, drafted_by
from tests.losslessness.test_option_table import OPTIONS
from workers.messages import Verification
from workers.router.config import RouterConfig

TEMPERATURES = {Verification.COUPLED: (0.0, 0.8), Verification.RATIO: (0.0,)}


def same(drafted: Answer, plain: Answer) -> bool:
    """Whether all choices have the same ids, text and end."""
    parts = [
        [(choice.ids, choice.text, choice.finish_reason) for choice in answer.choices] for answer in (drafted, plain)
    ]
    return parts[0] == parts[1]


def rows_of(client: TestClient, name: str, seeds: int) -> list[Row]:
    """Ask with one option, in all ways."""
    asked = [
        {**OPTIONS[name], "temperature": temperature, "seed": seed, **({"prompt": f"The sky {seed}"})}
        for temperature in TEMPERATURES[Verification.COUPLED]
        for seed in range(seeds)
    ]
    plain = [ask(client, **options, **OFF) for options in asked]
    rows = []
    for verification, temperatures in TEMPERATURES.items():
        for drafter in DRAFTER_NOISE:
            for stream in (False, True):
                equal = [
                    same(ask(client, stream, **options, **drafted_by(drafter, 4, verification)), expected)
                    for options, expected in zip(asked, plain, strict=True)
                    if options["temperature"] in temperatures
                ]
                case = f"{name}, {verification}, {'streamed' if stream else 'whole'}, {drafter} drafter"
                rows.append(Row(case, sum(equal), "identical", bound=len(equal), ratio=sum(equal) / len(equal)))
    return rows


def main() -> None:
    """Run the benchmark; exits with 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    seeds = 1 if parser.parse_args().quick else 5
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        drafters = {name: load(saved) for name, saved in save_drafters(save_byte_llama(folder), folder).items()}
        codec = TextCodec.load(str(folder))
        service = InProcessService(load(folder), drafters, codec, RouterConfig(max_draft_tokens=4))
        with TestClient(application(service, codec, max_draft_tokens=4)) as client:
            rows = [row for option in OPTIONS for row in rows_of(client, option, seeds)]
    report("options", rows)
    if any(row.value != row.bound for row in rows):
        raise SystemExit("an answer differs")


if __name__ == "__main__":
    main()
