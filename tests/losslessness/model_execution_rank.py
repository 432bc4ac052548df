"""One of two ranks that run cases of the model execution tests, for one model after the other.

`python -m tests.losslessness.model_execution_rank RANK` reads lines of JSON. {"folder": path, "port": n} loads a model,
which rank 0 answers with {}. Rank 0 then takes {"case": {…}}, answered by the result, until {"end": true}, and rank 1
follows it; after that, both take the next model.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.limits import HANG_S
from tests.losslessness.model_execution import Case, Share, load_drafters, run_case
from workers.engine.tensor_parallel import TensorParallelRank, follow

TIMEOUT_S = 5 * HANG_S
"""pytest ends a test before; nothing here is about ranks that are late."""


def main() -> None:
    torch.set_num_threads(1)
    number = int(sys.argv[1])
    commands = (json.loads(line) for line in sys.stdin)
    for command in commands:
        rank = TensorParallelRank(number, 2, "127.0.0.1", command["port"], TIMEOUT_S)
        # Drafters first: they are not split, and know nothing of the group.
        drafters = load_drafters(Path(command["folder"])) if number == 0 else {}
        share = Share.load(command["folder"], rank)
        if number == 0:
            answer({})
            for asked in commands:
                if "end" in asked:
                    break
                answer(asdict(run_case(share, drafters, Case(**asked["case"]))))
        else:
            follow(share.engine())
        share.engine().close()


def answer(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


if __name__ == "__main__":
    main()
