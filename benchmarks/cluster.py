"""A service over several Ray nodes on one machine: where its processes land, and streams that outlive nodes.

One node claims four A100s, two claim an L4 each; the models are the embedded pair with emulated device times, so every
time here is emulated. `make bench BENCH=cluster`, `QUICK=1` for two ranks, fewer streams, and without the loss of the
target's node.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.cluster_nodes import HEAD_LABELS, Nodes, serving_on_nodes, several_nodes
from benchmarks.harness import Row, report, tiny_pair_config
from benchmarks.load import SEEDED, completion_body
from deployments.api_client import ServiceError, open_client, stream_events
from models.corpus import held_out_prompts

ACCELERATOR = "leadout/accelerator"
A100, L4 = {ACCELERATOR: "A100"}, {ACCELERATOR: "L4"}
DRAFT_NODES = ("l4-0", "l4-1")
PATIENCE_S = 600.0
TOKENS_BEFORE_LOSS = 8


@dataclass(slots=True)
class Stream:
    """The ids that a stream has brought, when its events came, whether it ended, and whether as it should."""

    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ended: bool = False
    problem: str | None = None
    was_open: bool = False  # when something was lost

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two events."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


def service_config(ranks: int) -> dict[str, Any]:
    """Return the arguments of a target over `ranks` GPUs of the A100 node, and a drafter on each L4 node.

    Router and ingress stay on the head, which outlives the others.
    """
    config = tiny_pair_config(
        target={"tensor_parallel_size": ranks, "num_gpus": 1.0, "node_labels": A100, "emulated": {}},
        drafters={"num_gpus": 1.0, "node_labels": L4, "replicas": len(DRAFT_NODES), "emulated": {}},
        router={"node_labels": HEAD_LABELS, "queue_timeout_s": PATIENCE_S},
        ingress={"node_labels": HEAD_LABELS, "request_timeout_s": 2 * PATIENCE_S},
    )
    return dict(config["applications"][0]["args"])


def landings(nodes: Nodes, url: str, role: str) -> list[str | None]:
    """Return the node of each process of each worker of `role`."""
    workers = httpx.get(f"{url}/status", timeout=60.0).json()["workers"]
    registrations = [entry["registration"] for entry in workers if entry["registration"]["role"] == role]
    return [nodes.node_of(pid) for each in registrations for pid in each["process_ids"]]


async def read_streams(
    url: str, bodies: Sequence[dict[str, Any]], lose: Callable[[], None] | None = None
) -> list[Stream]:
    """Ask all bodies at once; call `lose` as soon as every stream has brought a few tokens."""
    streams = [Stream() for _ in bodies]

    async def read(client: httpx.AsyncClient, body: dict[str, Any], stream: Stream) -> None:
        try:
            async for event in stream_events(client, "/v1/completions", {**body, "stream": True}):
                for choice in event["choices"]:
                    stream.ids += choice["token_ids"]
                stream.times.append(time.perf_counter())
        except ServiceError as error:
            stream.problem = str(error)
        stream.ended = True

    async def lose_midway() -> None:
        while any(len(stream.ids) < TOKENS_BEFORE_LOSS and not stream.ended for stream in streams):
            await asyncio.sleep(0.02)
        for stream in streams:
            stream.was_open = not stream.ended
        if lose is not None:
            await asyncio.to_thread(lose)

    async with open_client(url) as client:
        client.timeout = httpx.Timeout(2 * PATIENCE_S)
        readers = [read(client, body, stream) for body, stream in zip(bodies, streams, strict=True)]
        await asyncio.gather(lose_midway(), *readers)
    return streams


def loss_rows(case: str, streams: Sequence[Stream], expected: Sequence[list[int]]) -> list[Row]:
    """Rows of a run in which something was lost: also how many streams were open then."""
    were_open = sum(stream.was_open for stream in streams)
    return [Row(f"{case}: streams open then", were_open, "streams"), *same_rows(case, streams, expected)]


def same_rows(case: str, streams: Sequence[Stream], expected: Sequence[list[int]]) -> list[Row]:
    """Rows of a run: how many streams have the expected ids, and their longest silence."""
    for stream in streams:
        if stream.problem is not None:
            print(f"{case}: {stream.problem}")
    same = sum(stream.problem is None and stream.ids == ids for stream, ids in zip(streams, expected, strict=True))
    count = len(expected)
    return [
        Row(f"{case}: streams with the same ids", same, "streams", bound=count, ratio=same / count),
        Row(f"{case}: longest silence of a stream (emulated)", max(each.longest_gap_s for each in streams), "s"),
    ]


def measure(quick: bool) -> list[Row]:
    """Place, stream, and take nodes away."""
    ranks, count, tokens = (2, 4, 64) if quick else (4, 8, 160)
    bodies = [completion_body(prompt, SEEDED, True, tokens) for prompt in held_out_prompts(count)]
    plain = [body | {"speculation": {"enabled": False}} for body in bodies]
    with several_nodes() as nodes:
        nodes.add("a100", ranks, 4, A100)
        for name in DRAFT_NODES:
            nodes.add(name, 1, 1, L4)
        with serving_on_nodes(service_config(ranks), len(DRAFT_NODES), PATIENCE_S) as url:
            targets, drafters = landings(nodes, url, "target"), landings(nodes, url, "draft")
            on_l4 = len({node for node in drafters if node in DRAFT_NODES})
            rows = [
                Row("ranks of the target on the A100 node", targets.count("a100"), "processes", bound=ranks),
                Row("L4 nodes with a drafter", on_l4, "nodes", bound=len(DRAFT_NODES)),
            ]
            expected = [stream.ids for stream in asyncio.run(read_streams(url, plain))]
            rows += same_rows("all nodes", asyncio.run(read_streams(url, bodies)), expected)
            lost = asyncio.run(read_streams(url, bodies, lambda: nodes.kill(DRAFT_NODES[0])))
            rows += loss_rows("an L4 node lost", lost, expected)
            if not quick:
                rows += target_node_lost(nodes, url, ranks, bodies, expected)
    return rows


def target_node_lost(
    nodes: Nodes, url: str, ranks: int, bodies: Sequence[dict[str, Any]], expected: Sequence[list[int]]
) -> list[Row]:
    """Take the target's node away while it serves, and give another one like it."""

    def replace_node() -> None:
        nodes.kill("a100")
        nodes.add("a100-new", ranks, 4, A100)

    streams = asyncio.run(read_streams(url, bodies, replace_node))
    rows = loss_rows("the A100 node lost, another added", streams, expected)
    landed = landings(nodes, url, "target").count("a100-new")
    return [*rows, Row("ranks of the target on the new A100 node", landed, "processes", bound=ranks)]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    report("cluster", measure(parser.parse_args().quick))


if __name__ == "__main__":
    main()
