"""Fixtures of the HTTP tests: a codec, in-process clients and a real server on a free port."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import uvicorn
from starlette.testclient import TestClient

from deployments.http_app import ServingLimits, create_app
from deployments.text import TextCodec
from tests.deployments.helpers import LIMITS, SOME, says
from tests.fakes import ScriptedService, byte_tokenizer
from tests.limits import HANG_S, wait_until


@pytest.fixture(scope="session")
def codec() -> TextCodec:
    return TextCodec(byte_tokenizer())


@pytest.fixture
def client_of(codec: TextCodec) -> Callable[..., TestClient]:
    """A client of the application over a scripted service."""

    def make(service: ScriptedService, limits: ServingLimits = LIMITS, codec: TextCodec = codec) -> TestClient:
        return TestClient(create_app(service, codec, limits), raise_server_exceptions=False)

    return make


@pytest.fixture
def service() -> ScriptedService:
    """A service that answers every request with the ids SOME."""
    return ScriptedService(says(SOME))


@pytest.fixture
def client(client_of: Callable[..., TestClient], service: ScriptedService) -> TestClient:
    return client_of(service)


@pytest.fixture
def serving(codec: TextCodec) -> Callable[..., object]:
    """A context manager that serves a scripted service on 127.0.0.1 and gives its base URL."""

    @contextmanager
    def serve(service: ScriptedService, limits: ServingLimits = LIMITS) -> Iterator[str]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            config = uvicorn.Config(
                create_app(service, codec, limits), log_level="warning", lifespan="off", timeout_keep_alive=int(HANG_S)
            )
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
            thread.start()
            try:
                wait_until(lambda: server.started)
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                thread.join(HANG_S)

    return serve
