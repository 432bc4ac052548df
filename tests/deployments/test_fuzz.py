"""Requests made from the served description: no server error but those that were made, and always OpenAI's error."""

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from starlette.testclient import TestClient

from deployments.http_app import create_app
from deployments.text import TextCodec
from tests.deployments.fuzzing import DESCRIPTION, ROOMY, FuzzedRequest, check, fuzzed_requests, moody, send
from tests.fakes import ScriptedService, byte_tokenizer


def test_generated_requests_get_sound_answers_or_openais_errors() -> None:
    service = ScriptedService(moody)
    client = TestClient(create_app(service, TextCodec(byte_tokenizer()), ROOMY), raise_server_exceptions=False)
    statuses: Counter[Any] = Counter()

    @given(fuzzed_requests())
    @settings(max_examples=200, suppress_health_check=list(HealthCheck))
    def try_one(request: FuzzedRequest) -> None:
        response = send(client, request)
        statuses[response.status_code] += 1
        check(request, response)

    try_one()
    assert min(statuses[200], statuses[400]) > 30
    assert client.get("/health").status_code == 200


def test_the_description_is_served() -> None:
    client = TestClient(create_app(ScriptedService(moody), TextCodec(byte_tokenizer()), ROOMY))
    assert client.get("/openapi.json").json() == DESCRIPTION
