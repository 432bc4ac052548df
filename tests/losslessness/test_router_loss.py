"""Routers die, again and again, while they answer: clients get the very answers that they would have got."""

from collections.abc import Callable, Iterator

import pytest
from starlette.testclient import TestClient

from deployments.resuming import ResumingService
from deployments.text import TextCodec
from tests.in_process import InProcessService, MortalService, application
from tests.losslessness.asking import ask, drafted_by
from tests.losslessness.test_option_table import OPTIONS, assert_same


@pytest.fixture(scope="module")
def mortal(make_service: Callable[..., InProcessService]) -> MortalService:
    service = make_service("noisy", kind=MortalService)
    assert isinstance(service, MortalService)
    return service


@pytest.fixture(scope="module")
def resuming_client(mortal: MortalService, codec: TextCodec) -> Iterator[TestClient]:
    with TestClient(application(mortal, codec, around=ResumingService)) as client:
        yield client


@pytest.mark.parametrize("name", OPTIONS)
def test_an_answer_survives_the_loss_of_its_router(
    resuming_client: TestClient, mortal: MortalService, name: str
) -> None:
    options = {**OPTIONS[name], "temperature": 0.8, "seed": 7}
    mortal.life = 0
    undisturbed = ask(resuming_client, **options, **drafted_by("noisy"))
    before = mortal.losses
    mortal.life = 2 * OPTIONS[name].get("n", 1)
    for stream in (False, True):
        answer = ask(resuming_client, stream, **options, **drafted_by("noisy"))
        assert_same(answer, undisturbed)
        tokens, report = answer.usage["completion_tokens"], answer.usage["speculation"]
        # What stands behind the end of a block is not counted.
        assert report["verifications"] <= tokens <= report["verifications"] + report["accepted_tokens"]
        assert report["accepted_tokens"] == sum(report["accepted_per_position"])
    assert mortal.losses > before
