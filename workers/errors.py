"""The errors of the service: a small tree, mapped to HTTP once, at the edge."""


class LeadoutError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigurationError(LeadoutError):
    """The deployment cannot start as configured. The message is one line and names the key or folder."""


class LinkError(LeadoutError):
    """A message to a worker got no answer."""


class LinkClosedError(LinkError):
    """The worker is gone; its state with it."""


class DeadlineExceededError(LinkError):
    """The worker did not answer in time; it may still do the work, so the answer must be dropped."""


class UnfitWorkerError(LinkError):
    """The worker answers, but not with anything that is of use: it has to be replaced."""


class OutOfBlocksError(LeadoutError):
    """The KV pool has too few free blocks for a step; nothing was changed."""


class GrammarError(LeadoutError):
    """A grammar cannot be compiled, or not be used here; the message is one line and says why."""


class RequestError(LeadoutError):
    """A request that is refused or cannot be finished. `status`, `code` and `param` are OpenAI's."""

    status = 500
    code: str | None = None
    error_type = "server_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(RequestError):
    """A field of the request has an impossible value; `param` names it."""

    status = 400
    code = "invalid_value"
    error_type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """Prompt and max_tokens do not fit into the model's context."""

    code = "context_length_exceeded"


class ModelNotFoundError(RequestError):
    """The request names a model that is not served."""

    status = 404
    code = "model_not_found"
    error_type = "invalid_request_error"


class OverloadedError(RequestError):
    """The queue is full; the client should retry later."""

    status = 429
    code = "overloaded"
    error_type = "overloaded_error"


class UnavailableError(RequestError):
    """No target can answer now."""

    status = 503
    code = "service_unavailable"


class RouterLostError(UnavailableError):
    """The router that owned a sequence is gone; another one may go on with it."""
