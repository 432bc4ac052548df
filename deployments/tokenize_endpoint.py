"""POST /tokenize: how many tokens a text or a conversation has, and which."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.openai_schema import parse_request
from deployments.openai_tokenize import TokenizeChatRequest, TokenizePromptRequest
from deployments.planning import ServingLimits
from deployments.request_body import read_json_object
from deployments.text import TextCodec, off_loop_if_long


class TokenizeEndpoint:
    """Answers without the router: the ingress has the tokenizer."""

    def __init__(self, codec: TextCodec, limits: ServingLimits) -> None:
        self._codec = codec
        self._limits = limits

    async def tokenize(self, request: Request) -> Response:
        """Return `count`, `max_model_len`, `tokens` and, if asked for, `token_strs`."""
        body = await read_json_object(request, self._limits.max_body_bytes)
        asked: TokenizeChatRequest | TokenizePromptRequest
        if "messages" in body:
            asked = parse_request(TokenizeChatRequest, body)
        else:
            asked = parse_request(TokenizePromptRequest, body)
        self._limits.check_model(asked.model)
        tokens = await self._tokens(asked)
        answer = {"count": len(tokens), "max_model_len": self._limits.context_length, "tokens": tokens}
        texts = [self._codec.backend.id_to_token(token) for token in tokens] if asked.return_token_strs else None
        return JSONResponse({**answer, "token_strs": texts})

    async def _tokens(self, asked: TokenizeChatRequest | TokenizePromptRequest) -> list[int]:
        if isinstance(asked, TokenizeChatRequest):
            ids = await off_loop_if_long(asked.characters, lambda: self._codec.encode_chat(asked.conversation))
        else:
            prompt, special = asked.prompt, asked.add_special_tokens
            ids = await off_loop_if_long(len(prompt), lambda: self._codec.encode(prompt, special))
        return [int(token) for token in ids]
