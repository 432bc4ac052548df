"""One client's sequence from its arrival to its end: the times that its client sees, and how it ended."""

import time

from workers.messages import GenerationEvent, GenerationFailed, GenerationRequest
from workers.router.metrics_recorder import CANCELLED, MetricsRecorder


class RequestWatch:
    """Follows the events of one client's sequence, from its arrival on.

    The first tokens behind those that another router has told are neither the client's first, nor do they follow on
    others that were seen here; their times are nobody's.
    """

    def __init__(self, recorder: MetricsRecorder, request: GenerationRequest) -> None:
        self._store = recorder.store
        self._prompt_tokens = len(request.prompt)
        self._is_answered = request.is_answered
        self._arrived_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s = 0.0
        self._tokens = 0
        self._outcome: str = CANCELLED

    def refused(self, failure: GenerationFailed) -> None:
        """Note that the sequence was not even admitted."""
        self.note(failure)
        self.end()

    def note(self, event: GenerationEvent) -> None:
        """Note an event at the time it is handed over."""
        if isinstance(event, GenerationFailed):
            self._outcome = event.code
            return
        now_s = time.monotonic()
        if len(event.token_ids):
            if self._first_s is None:
                self._first_s = now_s
                if not self._is_answered:
                    self._store.observe("time_to_first_token_seconds", now_s - self._arrived_s)
            else:
                self._store.observe("inter_chunk_seconds", now_s - self._last_s)
            self._last_s = now_s
            self._tokens += len(event.token_ids)
        if event.finish_reason is not None:
            self._outcome = event.finish_reason
            self._finished(now_s, 0 if event.usage is None else event.usage.cached_prompt_tokens)

    def end(self) -> None:
        """Count the sequence by how it ended; without a last event it was cancelled."""
        self._store.add("requests", (self._outcome,))

    def _finished(self, now_s: float, cached_prompt_tokens: int) -> None:
        store = self._store
        store.add("prompt_tokens", (), self._prompt_tokens)
        store.add("cached_prompt_tokens", (), cached_prompt_tokens)
        store.observe("request_duration_seconds", now_s - self._arrived_s)
        if self._first_s is not None and self._tokens > 1:
            store.observe("time_per_output_token_seconds", (self._last_s - self._first_s) / (self._tokens - 1))
