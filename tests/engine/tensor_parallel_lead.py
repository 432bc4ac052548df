"""Rank 0 of the tensor-parallel tests: runs what it reads from standard input as JSON, one command per line.

`python -m tests.engine.tensor_parallel_lead FOLDER PORT TIMEOUT`; it joins after an empty line. Commands are
{"steps": [[id, first, ids, rows], ...]} (parents may follow the rows), {"keep": [[id, first, nodes], ...]},
{"publish": [id, ids]}, {"start": [id, ids]}, {"weights": true} and {"close": true}; each is answered by one line of
JSON.
"""

import json
import sys

from tests.engine.tensor_parallel_peer import load, wait_for_go
from tests.engine.weight_pages import mapped_and_owned_bytes
from workers.engine.step import AcceptedPath, StepInput
from workers.errors import LinkClosedError
from workers.messages import token_ids


def step_input(sequence_id: int, first: int, ids: list[int], rows: int, parents: list[int] | None = None) -> StepInput:
    """One input of a step from plain numbers."""
    return StepInput(sequence_id, first, token_ids(ids), rows, None if parents is None else token_ids(parents))


def main() -> None:
    folder, port, timeout_s = sys.argv[1:]
    wait_for_go()
    engine = load(folder, 0, int(port), float(timeout_s))
    print(json.dumps({"ready": engine.total_blocks}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer: object = None
        if "keep" in command:
            engine.keep_paths([AcceptedPath(one, first, token_ids(nodes)) for one, first, nodes in command["keep"]])
        elif "publish" in command:
            engine.publish(command["publish"][0], token_ids(command["publish"][1]))
        elif "start" in command:
            answer = engine.start(command["start"][0], token_ids(command["start"][1]))
        elif "weights" in command:
            answer = mapped_and_owned_bytes(engine.model)
        elif "close" in command:
            engine.close()
        else:
            inputs = [step_input(*each) for each in command["steps"]]
            for item in inputs:
                if engine.length(item.sequence_id) is None:
                    engine.start(item.sequence_id)
            try:
                answer = engine.forward(inputs).tolist()
            except LinkClosedError as error:
                answer = {"link_closed": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
