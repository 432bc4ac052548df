"""The HTTP application over a real router whose workers are toys: what the router does to choices, seen by clients."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from deployments.http_app import ServingLimits, create_app
from deployments.text import TextCodec
from tests.fakes import FIRST_TOY_OUTPUT, TOY_VOCABULARY, ScriptedDrafter, ScriptedTarget, piece_tokenizer, toy_next
from tests.router.helpers import assert_nothing_is_left, run
from workers.decoding.detokenizer import IncrementalDetokenizer
from workers.router.config import RouterConfig
from workers.router.router import Router

PIECES = [f"<{number}>" for number in range(FIRST_TOY_OUTPUT)] + [
    " ab", "b", "é", " wor", "ld", "a", "日本", ".", "\n", " the", "re", "s", "t", " x", "yz", " end",
]  # fmt: skip
assert len(PIECES) == TOY_VOCABULARY
Post = Callable[..., Awaitable[httpx.Response]]


def toy_codec() -> TextCodec:
    """The toy model's tokenizer; it has no end token."""
    build: Callable[..., TokenizersBackend] = TokenizersBackend
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return TextCodec(build(tokenizer_object=piece_tokenizer(PIECES), chat_template=template))


def with_toy_app(test: Callable[[Post], Awaitable[None]], prefix_caching: bool = False, **router_limits: Any) -> None:
    """Run `test` with a function that posts to the application; afterwards no sequence may be left anywhere."""
    codec = toy_codec()
    limits = ServingLimits("toy", context_length=256, vocabulary_size=TOY_VOCABULARY, drafter_names=("toy-draft",))
    target, drafter = ScriptedTarget(prefix_caching=prefix_caching), ScriptedDrafter(toy_next)

    async def body() -> None:
        router = Router(RouterConfig(**router_limits), lambda p: IncrementalDetokenizer(codec.backend, p.tolist()))
        for worker in (target, drafter):
            await router.register(worker.registration, worker)
        transport = httpx.ASGITransport(create_app(router, codec, limits))
        async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:

            async def post(path: str, **fields: Any) -> httpx.Response:
                return await client.post(path, json=fields)

            await test(post)
        await assert_nothing_is_left(router, target, drafter)
        await router.close()
        assert target.violations == drafter.violations == []

    run(body)
