"""One line for each request that has ended, for people or as JSON. Holds text of clients only if that is asked for."""

import json
import logging
import logging.handlers
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from workers.messages import SpeculationUsage, TokenIds
from workers.telemetry.timeline import Phase, Timeline

LOGGER_NAME = "leadout.requests"


@dataclass(frozen=True, slots=True)
class RequestLogConfig:
    """What to log of requests that have ended. `file` None is the standard error of the router's process.

    With `text` a line also holds the prompt and the answer.
    """

    enabled: bool = True
    format: Literal["human", "json"] = "human"
    text: bool = False
    file: str | None = None


WITHOUT_TEXT = RequestLogConfig()


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What a line tells. `outcome` is why it ended: stop, length, cancelled, or the code of an error.

    `queue_ms`, `prefill_ms` and `decode_ms` add up to `total_ms`; see `Timeline`. `first_token_ms` is counted from the
    beginning and None if there was none, as is `accepted_length`, the committed tokens per verification.
    """

    request_id: str
    outcome: str
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    verifications: int
    draft_tokens: int
    accepted_tokens: int
    accepted_length: float | None
    drafter: str | None
    fallback_rounds: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    total_ms: float
    first_token_ms: float | None
    trace_id: str | None
    prompt: str | None = None
    answer: str | None = None


def ended_request(
    request_id: str,
    outcome: str,
    tokens: tuple[int, int],
    usage: SpeculationUsage,
    timeline: Timeline,
    trace_id: str | None,
) -> EndedRequest:
    """Return what to tell of a request with so many prompt and output `tokens`."""
    per_verification = usage.committed_tokens / usage.verifications if usage.verifications else None
    return EndedRequest(
        request_id=request_id,
        outcome=outcome,
        prompt_tokens=tokens[0],
        cached_prompt_tokens=usage.cached_prompt_tokens,
        output_tokens=tokens[1],
        verifications=usage.verifications,
        draft_tokens=usage.draft_tokens,
        accepted_tokens=usage.accepted_tokens,
        accepted_length=None if per_verification is None else round(per_verification, 3),
        drafter=usage.drafter,
        fallback_rounds=usage.fallback_rounds,
        queue_ms=round(timeline.spent_ms(Phase.QUEUE), 3),
        prefill_ms=round(timeline.spent_ms(Phase.PREFILL), 3),
        decode_ms=round(timeline.spent_ms(Phase.DECODE), 3),
        total_ms=round(timeline.total_ms, 3),
        first_token_ms=None if timeline.first_token_ms is None else round(timeline.first_token_ms, 3),
        trace_id=trace_id,
    )


class RequestLog:
    """Writes the lines. `decode` turns token ids into text; without it there is none to log."""

    def __init__(
        self, config: RequestLogConfig = WITHOUT_TEXT, decode: Callable[[list[int]], str] | None = None
    ) -> None:
        self.decode = decode if config.text else None
        self._line = _json_line if config.format == "json" else _human_line
        self._logger = logging.getLogger(LOGGER_NAME)

    def ended(self, request: EndedRequest) -> None:
        """Write the line of a request."""
        self._logger.info(self._line(request))

    def text_of(self, tokens: TokenIds) -> str | None:
        """Return the text to log for `tokens`; None if none is wanted."""
        return None if self.decode is None else self.decode(tokens.tolist())


def open_request_log(config: RequestLogConfig, decode: Callable[[list[int]], str]) -> RequestLog | None:
    """Return the log of this process, whose lines go where the configuration says; None if it is off."""
    if not config.enabled:
        return None
    log = logging.getLogger(LOGGER_NAME)
    log.setLevel(logging.INFO)
    # Lines as they are, once: whatever handles the process's other lines would add its own format.
    log.propagate = False
    if not log.handlers:
        handler = _handler(config.file)
        if config.format == "human":
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(handler)
    return RequestLog(config, decode)


def _handler(file: str | None) -> logging.Handler:
    if file is None:
        # Not `sys.stderr`: in a replica of Serve that would put Serve's own format around each line.
        return logging.StreamHandler(sys.__stderr__)
    # Watched: the file may be moved away to begin another.
    return logging.handlers.WatchedFileHandler(file)


def _json_line(request: EndedRequest) -> str:
    told = {
        key: value for key, value in asdict(request).items() if key not in ("prompt", "answer") or value is not None
    }
    return json.dumps(told)


def _human_line(request: EndedRequest) -> str:
    drafts = "no drafts"
    if request.draft_tokens and request.accepted_length is not None:
        drafts = f"accepted length {request.accepted_length:.2f} ({request.accepted_tokens} of {request.draft_tokens} "
        drafts += f"drafts of {request.drafter or 'the target'})"
    line = (
        f"request {request.request_id} {request.outcome}: {request.prompt_tokens} + {request.output_tokens} tokens, "
        f"{drafts}, queue {request.queue_ms:.1f} ms, prefill {request.prefill_ms:.1f} ms, "
        f"decode {request.decode_ms:.1f} ms, total {request.total_ms:.1f} ms"
    )
    line += "" if request.trace_id is None else f", trace {request.trace_id}"
    # As JSON strings, so that a line stays one line.
    texts = (("prompt", request.prompt), ("answer", request.answer))
    return line + "".join(f", {name} {json.dumps(text)}" for name, text in texts if text is not None)
