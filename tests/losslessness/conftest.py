"""One application for all tests of this folder: a tiny target with a drafter of each kind, in one process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from deployments.text import TextCodec
from tests.in_process import InProcessService, application, load, save_byte_llama, save_drafters
from tests.limits import HANG_S
from workers.router.config import RouterConfig

MAX_DRAFT_TOKENS = 8


@pytest.fixture(autouse=True)
def drafting_ahead_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters as large as their target never have the time to draft ahead; here they take it."""
    monkeypatch.setattr("workers.router.ahead.TOLERANCE", 1e9)
    monkeypatch.setattr("workers.router.ahead.AheadJudge.pays", lambda judge, *times_ms: True)


@pytest.fixture(autouse=True)
def no_drafts_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine, a round waits for its drafts: else the target would look some up instead."""
    monkeypatch.setattr("workers.router.drafting.LATE_FLOOR_S", HANG_S)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target, with its drafters in folders inside."""
    folder = tmp_path_factory.mktemp("target")
    save_drafters(save_byte_llama(folder), folder)
    return folder


@pytest.fixture(scope="session")
def codec(model_folder: Path) -> TextCodec:
    return TextCodec.load(str(model_folder))


@pytest.fixture(scope="session")
def make_service(model_folder: Path, codec: TextCodec) -> Callable[..., InProcessService]:
    """Builds a service that does all it can to be fast, with the named drafters.

    `max_context_tokens` and `kv_cache_gib` are the target's.
    """

    def make(
        *drafters: str,
        max_context_tokens: int | None = None,
        kv_cache_gib: float = 0.01,
        kind: type[InProcessService] = InProcessService,
    ) -> InProcessService:
        target = load(model_folder, max_context_tokens=max_context_tokens, kv_cache_gib=kv_cache_gib)
        engines = {name: load(model_folder / name) for name in drafters}
        config = RouterConfig(
            MAX_DRAFT_TOKENS, propose_deadline_s=HANG_S, draft_ahead=True, max_cohorts=2, fallback="prompt_lookup"
        )
        return kind(target, engines, codec, config)

    return make


@pytest.fixture(scope="session")
def client(make_service: Callable[..., InProcessService], codec: TextCodec) -> Iterator[TestClient]:
    """The application; requests choose their drafter by name: own, noisy or random."""
    with TestClient(application(make_service("own", "noisy", "random"), codec)) as client:
        yield client


@pytest.fixture(scope="session")
def small_client(make_service: Callable[..., InProcessService], codec: TextCodec) -> Iterator[TestClient]:
    """The application with a context of 64 tokens."""
    with TestClient(application(make_service("own", max_context_tokens=64), codec)) as client:
        yield client
