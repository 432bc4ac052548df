"""What the router needs to know of the deployment."""

from dataclasses import dataclass

from workers.messages import Verification
from workers.router.draft_length import DraftLengthName


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Limits and deadlines of one router. Times in seconds.

    `max_draft_tokens` is the draft length k; 0 switches speculation off. `verification` is for requests that do not
    choose. `max_batch_sequences` bounds a cohort, `prefill_chunk_tokens` the prompt tokens that one step reads. Beside
    decoding sequences it reads fewer, so that the step takes about `prefill_latency_factor` (above 1) times as long as
    without them at most.

    `draft_length_policy` names a policy of `workers.router.draft_length`. `max_cohorts` bounds how many cohorts of a
    target are under way at a time, and `grouping` says whether they are alike in draft length ("acceptance") or drawn
    ("random", to see what that is worth). With `draft_ahead` a drafter goes on while the target verifies. `fallback`
    is what a sequence without a drafter gets: drafts that the target looks up in its text ("prompt_lookup"), or "none".
    With `bench_drafters` a drafter whose drafts cost more than they bring is left out for a while.

    `check_share` (0 to 1) of the finished requests are decoded again without drafts where there is idle capacity;
    `check_max_pending` of them may wait for it, and each is dropped when it is not through after `check_timeout_s`.

    The load by which workers are scaled is that of the last `load_window_s`.
    """

    max_draft_tokens: int = 4
    verification: Verification = Verification.COUPLED
    max_running_sequences: int = 64
    max_waiting_sequences: int = 256
    max_batch_sequences: int = 32
    prefill_chunk_tokens: int = 512
    prefill_latency_factor: float = 2.0
    queue_timeout_s: float = 60.0
    propose_deadline_s: float = 10.0
    verify_deadline_s: float = 60.0
    check_share: float = 0.0
    check_max_pending: int = 16
    check_timeout_s: float = 60.0
    draft_length_policy: DraftLengthName = "fixed"
    draft_ahead: bool = False
    max_cohorts: int = 1
    grouping: str = "acceptance"
    fallback: str = "none"
    bench_drafters: bool = False
    load_window_s: float = 30.0
