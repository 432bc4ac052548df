"""Processes, cancellation, failure and clean ends of a real service."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from openai import BadRequestError, NotFoundError, OpenAI

from benchmarks.harness import ROOT, Service, tiny_pair_config
from benchmarks.idle import leftovers
from deployments.local_cluster import free_port
from tests.end_to_end.requests import SEEDED, TIMEOUT, ask_all, body, ids_of, stream
from tests.limits import HANG_S, wait_until


def workers_of(service: Service, role: str) -> list[dict[str, Any]]:
    """The status entries of the workers of a role."""
    return [entry for entry in service.status()["workers"] if entry["registration"]["role"] == role]


def is_idle(service: Service) -> bool:
    """Whether no sequence is left anywhere and every KV block is free; not if nobody can tell right now."""
    try:
        return not leftovers(service).any
    except httpx.HTTPError:
        return False


def test_router_drafter_and_target_are_processes_of_their_own(service: Service) -> None:
    titles = {
        process.info["pid"]: " ".join(process.info["cmdline"] or ())
        for process in psutil.process_iter(["pid", "cmdline"])
    }
    (target,), (drafter,) = workers_of(service, "target"), workers_of(service, "draft")
    (target_pid,), (drafter_pid,) = target["registration"]["process_ids"], drafter["registration"]["process_ids"]
    assert "TargetWorker" in titles[target_pid]
    assert "DraftWorker" in titles[drafter_pid]
    assert any("Router" in title for title in titles.values())


def test_messages_reach_both_workers_over_zeromq(service: Service) -> None:
    assert [entry["link"] for role in ("target", "draft") for entry in workers_of(service, role)] == ["zmq", "zmq"]


def test_closing_half_of_the_streams_frees_their_kv_at_once(service: Service, prompts: list[str]) -> None:
    requests = [body(prompt, SEEDED, max_tokens=160) for prompt in prompts[:16]]

    async def read(client: httpx.AsyncClient, request: dict[str, Any], chunks: int | None) -> list[int]:
        ids: list[int] = []
        source = stream(client, request)
        async for chunk in source:
            ids += chunk["choices"][0]["token_ids"]
            chunks = None if chunks is None else chunks - 1
            if chunks == 0:
                break
        await source.aclose()  # type: ignore[attr-defined]
        return ids

    async def run() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=service.url, timeout=TIMEOUT) as client:
            pending = [read(client, request, 5 if index % 2 else None) for index, request in enumerate(requests)]
            return list(await asyncio.gather(*pending))

    read_ids = asyncio.run(run())
    wait_until(lambda: is_idle(service))
    alone = list(map(ids_of, ask_all(service, requests)))
    assert all(ids == alone[index][: len(ids)] for index, ids in enumerate(read_ids))
    assert [len(ids) for ids in read_ids[::2]] == [len(ids) for ids in alone[::2]]


def test_a_client_that_leaves_a_whole_answer_frees_its_kv(service: Service, prompts: list[str]) -> None:
    request = body(prompts[0], SEEDED | {"ignore_eos": True}, max_tokens=900)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{service.url}/v1/completions", json=request, timeout=httpx.Timeout(HANG_S, read=0.3))
    wait_until(lambda: is_idle(service))


def test_the_official_client_completes_chats_streams_and_gets_typed_errors(service: Service) -> None:
    client = OpenAI(base_url=f"{service.url}/v1", api_key="unused", max_retries=0)
    model = client.models.list().data[0].id
    whole = client.completions.create(model=model, prompt="import os\n", max_tokens=16, temperature=0)
    parts = client.completions.create(model=model, prompt="import os\n", max_tokens=16, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    messages: Any = [{"role": "user", "content": "def add(a, b):\n"}]
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=16, temperature=0)
    chunks = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    received = list(chunks)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in received if chunk.choices) == (
        chat.choices[0].message.content
    )
    assert received[-1].usage is not None
    assert received[-1].usage.completion_tokens == 16
    with pytest.raises(NotFoundError):
        client.completions.create(model="nope", prompt="x")
    with pytest.raises(BadRequestError) as refused:
        client.completions.create(model=model, prompt="x", max_tokens=4, top_p=1.5, stream=True)
    assert refused.value.param == "top_p"


def test_a_prompt_over_the_context_is_refused_before_a_stream_opens(service: Service) -> None:
    request = {"prompt": [1] * 1020, "max_tokens": 60, "stream": True}
    answer = httpx.post(f"{service.url}/v1/completions", json=request, timeout=TIMEOUT)
    assert answer.status_code == 400
    assert all(number in answer.json()["error"]["message"] for number in ("1024", "1020", "60"))


def ids_while_killing(
    service: Service, request: dict[str, Any], role: str, how: signal.Signals = signal.SIGKILL
) -> list[int]:
    """Stream a request and signal the first process of a role as soon as there are tokens; return all ids.

    If it is a target's, /health must fail before the stream goes on.
    """
    unhealthy = False
    process_id = workers_of(service, role)[0]["registration"]["process_ids"][0]

    async def run() -> list[int]:
        ids: list[int] = []
        async with httpx.AsyncClient(base_url=service.url, timeout=TIMEOUT) as client:

            async def watch_health() -> None:
                nonlocal unhealthy
                while (await client.get("/health")).status_code == httpx.codes.OK:
                    await asyncio.sleep(0.1)
                unhealthy = True

            watching = None
            async for chunk in stream(client, request):
                if not ids:
                    os.kill(process_id, how)
                    watching = asyncio.create_task(watch_health())
                ids += chunk["choices"][0]["token_ids"]
            if watching is not None:
                watching.cancel()
        return ids

    ids = asyncio.run(run())
    assert unhealthy is (role == "target")
    return ids


def test_the_death_of_the_drafter_changes_no_text_and_drafting_returns(service: Service, prompts: list[str]) -> None:
    request = body(prompts[1], SEEDED, max_tokens=480)
    undisturbed = ids_of(ask_all(service, [request])[0])
    assert ids_while_killing(service, request, "draft") == undisturbed
    wait_until(lambda: bool(workers_of(service, "draft")))
    again = ask_all(service, [request])[0]
    assert ids_of(again) == undisturbed
    assert again["usage"]["speculation"]["draft_tokens"] > 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_death_or_stop_of_the_target_fails_health_and_resumes_the_same_text_on_its_successor(
    service: Service, prompts: list[str], how: signal.Signals
) -> None:  # B47
    request = body(prompts[2], SEEDED, max_tokens=480)
    undisturbed = ids_of(ask_all(service, [request])[0])
    assert ids_while_killing(service, request, "target", how) == undisturbed
    wait_until(lambda: is_idle(service))
    assert httpx.get(f"{service.url}/health").status_code == httpx.codes.OK


def test_the_death_of_the_router_resumes_the_same_text_on_its_successor(service: Service, prompts: list[str]) -> None:
    requests = [body(prompt, SEEDED, max_tokens=480) for prompt in prompts[3:5]]
    undisturbed = list(map(ids_of, ask_all(service, requests)))
    [router] = [process for process in psutil.process_iter(["cmdline"]) if is_router_of(service, process)]

    async def read(client: httpx.AsyncClient, request: dict[str, Any]) -> list[int]:
        ids: list[int] = []
        async for chunk in stream(client, request):
            ids += chunk["choices"][0]["token_ids"]
            if len(ids) > 20:
                with contextlib.suppress(psutil.NoSuchProcess):
                    router.kill()
        return ids

    async def run() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=service.url, timeout=TIMEOUT) as client:
            return list(await asyncio.gather(*(read(client, request) for request in requests)))

    assert asyncio.run(run()) == undisturbed
    assert not router.is_running()
    wait_until(lambda: is_idle(service))


def is_router_of(service: Service, process: psutil.Process) -> bool:
    """Whether it is a router, and of this service: others may run on the machine."""
    if not any("ServeReplica:leadout:Router" in part for part in process.info["cmdline"] or ()):
        return False
    return any(parent.pid == service.process.pid for parent in process.parents())


def test_two_requests_of_one_id_are_answered_with_it_and_cancelled_by_themselves(
    service: Service, prompts: list[str]
) -> None:
    request, same = body(prompts[3], SEEDED, max_tokens=200), {"x-request-id": "same"}
    alone = ids_of(ask_all(service, [request])[0])

    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=service.url, timeout=TIMEOUT, headers=same) as client:
            staying, leaving = stream(client, request), stream(client, request)
            ids = (await anext(staying))["choices"][0]["token_ids"]
            await anext(leaving)
            await leaving.aclose()  # type: ignore[attr-defined]
            async for chunk in staying:
                ids += chunk["choices"][0]["token_ids"]
        return list(ids)

    assert asyncio.run(run()) == alone
    for method, path in (("POST", "/v1/completions"), ("GET", "/nothing"), ("GET", "/health")):
        answer = httpx.request(method, service.url + path, headers=same)
        assert [value for name, value in answer.headers.multi_items() if name == "x-request-id"] == ["same"]


def test_a_worker_that_cannot_be_loaded_is_a_refusal_in_one_line(tmp_path: Path) -> None:
    model = tmp_path / "target"
    shutil.copytree(ROOT / "models" / "tiny-code" / "target", model)
    os.truncate(model / "model.safetensors", 1_000_000)
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(tiny_pair_config(target={"model": str(model)})))
    outcome = refused_start(path)
    (complaint,) = [line for line in outcome.stderr.splitlines() if line.startswith("leadout: ")]
    assert complaint.startswith(f"leadout: model {model} cannot be loaded: a file of weights is damaged")
    assert outcome.stdout == ""


def refused_start(path: Path) -> "subprocess.CompletedProcess[str]":
    """Run `leadout serve` on a file that it must refuse."""
    outcome = subprocess.run(
        [sys.executable, "-m", "deployments.cli", "serve", str(path), "--port", str(free_port())],
        cwd=ROOT,
        env=os.environ | {"RAY_TMPDIR": tempfile.mkdtemp(prefix="lo-", dir="/tmp")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert outcome.returncode == 2
    assert "Traceback" not in outcome.stderr
    return outcome


def test_a_taken_port_is_refused_in_one_line(service: Service) -> None:
    port = service.url.rsplit(":", 1)[1]
    outcome = subprocess.run(
        [sys.executable, "-m", "deployments.cli", "serve", "--port", port],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert outcome.returncode == 2
    assert f"127.0.0.1:{port}" in outcome.stderr
