"""Another drafter model while requests run: what is replaced, what requests notice, and what acceptance becomes.

`make bench BENCH=drafter_swap`: the embedded pair with two drafter replicas under steady load, deployed as KubeRay does
it, by a Serve config. Then the config says, in `user_config` of the drafter's deployment, that drafts come
from a copy of the target (nearly every draft is accepted), and then nothing any more, so that they come from the small
model again. At last `args` change, which Serve takes for another application: it replaces every process (not with
`QUICK=1`). Exits with 1 if a request failed, a text differed, or an update of drafters replaced anything else.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from benchmarks.chaos_faults import router_processes, worker_processes
from benchmarks.harness import ROOT, Row, report, tiny_pair_config
from benchmarks.load import SEEDED, completion_body
from benchmarks.raw_http import Answer, BrokenAnswerError, ask
from deployments.local_cluster import free_port, local_ray, wait_for_drafters, wait_until_ready
from models.corpus import held_out_prompts

REPLICAS = 2
AT_ONCE = 4
MAX_TOKENS = 120
PROMPTS = 16
STEADY_S, FEW_S = 20.0, 6.0
PATIENCE_S = 300.0
POLL_S = 0.1
TARGET_COPY = {"model": str(ROOT / "models" / "tiny-code" / "target")}


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer, which prompt it was to, and when it began and ended."""

    number: int
    answer: Answer | None
    began_s: float
    ended_s: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Ray of its own, and the service on it."""

    url: str

    def apply(self, config: dict[str, Any]) -> None:
        """Give Serve a config file's content, as `serve run` does, and KubeRay by way of the dashboard."""
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))

    def wait_until_applied(self) -> None:
        """Return when Serve says that the application runs as it should; RuntimeError if it says that it cannot."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            application = serve.status().applications.get("leadout")
            if application is not None and application.status == "RUNNING":
                return
            if application is not None and application.status == "DEPLOY_FAILED":
                raise RuntimeError(application.message)
            time.sleep(POLL_S)
        raise RuntimeError(f"the config was not applied within {PATIENCE_S:g} s")

    def processes(self) -> dict[str, set[int]]:
        """Return the process ids of the service by what they do."""
        pools = {role: worker_processes(self.url, role) for role in ("target", "draft")}
        return {role: {pid for ranks in workers for pid in ranks} for role, workers in pools.items()} | {
            "router": set(router_processes(os.getpid()))
        }


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Start a Ray and its proxy; end both with the block."""
    folder, port = Path(tempfile.mkdtemp(prefix="lo-", dir="/tmp")), free_port()
    # The application is built in a process of Serve's own, which has to find it.
    os.environ.update({"RAY_TMPDIR": str(folder), "PYTHONPATH": str(ROOT)})
    try:
        with local_ray(2 + REPLICAS):
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
            yield Cluster(f"http://127.0.0.1:{port}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def config_with(user_config: dict[str, Any] | None = None, max_draft_tokens: int = 4) -> dict[str, Any]:
    """Return the Serve config: two drafters, and what `user_config` of their deployment says otherwise.

    As much is drafted whether it pays or not: a drafter as slow as its target would hardly be asked, or be benched, and
    not be seen.
    """
    speculation = {"max_draft_tokens": max_draft_tokens, "draft_length_policy": "fixed", "bench_drafters": False}
    config = tiny_pair_config(drafters={"replicas": REPLICAS}, speculation=speculation)
    del config["http_options"]
    if user_config is not None:
        named = {"name": "DraftPool-tiny", "user_config": user_config}
        config["applications"][0]["deployments"] = [named]
    return config


class Load:
    """Requests that never cease, `AT_ONCE` at a time, until the block ends."""

    def __init__(self, url: str) -> None:
        self.finished: list[Finished] = []
        self._url = url
        self._over = asyncio.Event()
        self._numbers = itertools.count()
        self.bodies = [
            completion_body(prompt, SEEDED | {"seed": number, "stream": True}, True, MAX_TOKENS)
            | {"stream_options": {"include_usage": True}}
            for number, prompt in enumerate(held_out_prompts(PROMPTS))
        ]

    async def once(self) -> list[Finished]:
        """Ask every prompt once."""
        return [await self._ask(number) for number in range(len(self.bodies))]

    async def __aenter__(self) -> "Load":
        self._clients = [asyncio.create_task(self._client()) for _ in range(AT_ONCE)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await asyncio.gather(*self._clients)

    async def _client(self) -> None:
        while not self._over.is_set():
            self.finished.append(await self._ask(next(self._numbers) % len(self.bodies)))

    async def _ask(self, number: int) -> Finished:
        began_s = time.monotonic()
        try:
            answer = await ask(self._url, self.bodies[number])
            problem = problem_of(answer)
        except (BrokenAnswerError, OSError) as error:
            return Finished(number, None, began_s, time.monotonic(), f"{type(error).__name__}: {error}")
        return Finished(number, answer, began_s, time.monotonic(), problem)


def problem_of(answer: Answer) -> str:
    """Say how the answer failed, whether before its stream opened or in it; empty if it did not."""
    if answer.status != 200:
        return f"status {answer.status}"
    errors = [str(chunk["error"]) for chunk in answer.chunks if "error" in chunk]
    return errors[0] if errors else "" if "usage" in answer.chunks[-1] else "no usage"


def acceptance(finished: Sequence[Finished]) -> tuple[float, float]:
    """Return the share of drafts that were accepted, and of verifications that had none."""
    answers = [each.answer for each in finished if each.answer and not each.problem]
    usages = [answer.chunks[-1]["usage"]["speculation"] for answer in answers]
    drafted = sum(usage["draft_tokens"] for usage in usages)
    verified = sum(usage["verifications"] for usage in usages)
    accepted, undrafted = (sum(usage[key] for usage in usages) for key in ("accepted_tokens", "fallback_rounds"))
    return accepted / max(1, drafted), undrafted / max(1, verified)


async def update(place: Cluster, steady_s: float, case: str, change: Callable[[], None]) -> tuple[list[Row], list[str]]:
    """Change something under load; return the rows of it, and what was wrong."""
    load = Load(place.url)
    undisturbed = [each.answer.token_ids for each in await load.once() if each.answer]
    before = await asyncio.to_thread(place.processes)
    async with load:
        await asyncio.sleep(steady_s)
        began_s = time.monotonic()
        await asyncio.to_thread(change)
        await asyncio.to_thread(wait_until_replaced, place, before["draft"])
        ended_s = time.monotonic()
        await asyncio.sleep(steady_s)
    after = await asyncio.to_thread(place.processes)
    phases = {
        "before": [each for each in load.finished if each.ended_s <= began_s],
        "during": [each for each in load.finished if each.ended_s > began_s and each.began_s < ended_s],
        "after": [each for each in load.finished if each.began_s >= ended_s],
    }
    problems = [f"{case}: {each.problem}" for each in load.finished if each.problem]
    strayed = sum(
        each.answer is not None and not each.problem and each.answer.token_ids != undisturbed[each.number]
        for each in load.finished
    )
    if strayed:
        problems.append(f"{case}: {strayed} texts differ")
    gaps = [b - a for each in phases["during"] if each.answer for a, b in itertools.pairwise(each.answer.chunk_s)]
    rows = [
        Row(f"{case}: requests", len(load.finished), "requests"),
        Row(f"{case}: requests that failed", len(problems) - bool(strayed), "requests"),
        Row(f"{case}: texts that differ", strayed, "requests", bound=0),
        Row(f"{case}: until all drafters were replaced", ended_s - began_s, "s"),
        Row(f"{case}: longest pause of a stream", max(gaps, default=0.0), "s"),
    ]
    for phase, finished in phases.items():
        accepted, undrafted = acceptance(finished)
        rows.append(Row(f"{case}: drafts accepted {phase}", accepted, ""))
        rows.append(Row(f"{case}: rounds without drafts {phase}", undrafted, ""))
    for role in ("router", "target", "draft"):
        rows.append(Row(f"{case}: processes kept, {role}", len(before[role] & after[role]), "", len(before[role])))
    return rows, problems


def wait_until_replaced(place: Cluster, drafters: set[int]) -> None:
    """Return when all drafters are others; RuntimeError if they are not in time."""
    place.wait_until_applied()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError, KeyError):
            now = {pid for ranks in worker_processes(place.url, "draft") for pid in ranks}
            if len(now) == REPLICAS and not now & drafters:
                return
        time.sleep(POLL_S)
    raise RuntimeError(f"the drafters were not replaced within {PATIENCE_S:g} s")


def measure(quick: bool) -> tuple[list[Row], list[str]]:
    """Serve, and update the drafters in all ways."""
    steady_s = FEW_S if quick else STEADY_S
    with cluster() as place:
        place.apply(config_with())
        place.wait_until_applied()
        wait_until_ready(place.url, PATIENCE_S)
        wait_for_drafters(place.url, REPLICAS, PATIENCE_S)
        changes = {"small to large drafter": config_with(TARGET_COPY), "large to small drafter": config_with()}
        if not quick:
            changes["args changed"] = config_with(max_draft_tokens=5)
        rows: list[Row] = []
        wrong: list[str] = []
        for case, config in changes.items():
            told, problems = asyncio.run(update(place, steady_s, case, partial(place.apply, config)))
            rows += told
            # Where everything is replaced, there is no target for a while, and requests may find none in time.
            wrong += [problem for problem in problems if not case.startswith("args") or "differ" in problem]
        kept = [row for row in rows if "processes kept" in row.case and not row.case.startswith("args")]
        wrong += [row.case for row in kept if row.value != (0 if row.case.endswith("draft") else row.bound)]
    return rows, wrong


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    rows, wrong = measure(parser.parse_args().quick)
    report("drafter_swap", rows)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
