"""POST /detokenize: the text of token ids."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.openai_schema import parse_request
from deployments.openai_tokenize import DetokenizeRequest
from deployments.planning import ServingLimits
from deployments.request_body import read_json_object
from deployments.text import TextCodec, off_loop_if_long
from workers.errors import InvalidRequestError


class DetokenizeEndpoint:
    """Answers without the router: the ingress has the tokenizer."""

    def __init__(self, codec: TextCodec, limits: ServingLimits) -> None:
        self._codec = codec
        self._limits = limits

    async def detokenize(self, request: Request) -> Response:
        """Return `prompt`, the text of `tokens`, special tokens included."""
        body = await read_json_object(request, self._limits.max_body_bytes)
        asked = parse_request(DetokenizeRequest, body)
        self._limits.check_model(asked.model)
        size = self._limits.vocabulary_size
        if asked.tokens and max(asked.tokens) >= size:
            message = f"tokens: token id {max(asked.tokens)} is not below the vocabulary size {size}."
            raise InvalidRequestError(message, "tokens")
        prompt = await off_loop_if_long(
            len(asked.tokens), lambda: self._codec.decode(asked.tokens, special_tokens=True)
        )
        return JSONResponse({"prompt": prompt})
