"""Every metric there is: its name, type, unit, labels, what it means, and the buckets of histograms.

Names follow vLLM's where it has the same metric, and the OpenTelemetry conventions for generative AI in the bounds of
server histograms. Nothing is a ratio: those are for queries to form, over whatever time they ask about.
"""

from dataclasses import dataclass
from enum import StrEnum

PREFIX = "leadout_"
LOOKUP_DRAFTER = "prompt_lookup"
"""The `drafter` label of drafts that a target looked up in the text."""


class MetricType(StrEnum):
    """What a metric's values are: sums that only grow, a level, or observations by size."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `name` has neither the prefix nor a counter's `_total`; `buckets` are upper bounds, in order."""

    name: str
    type: MetricType
    unit: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()

    @property
    def family(self) -> str:
        """The name with its prefix, which is also that of a gauge's samples."""
        return PREFIX + self.name

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names that its samples have where they are exported."""
        suffixes = {
            MetricType.COUNTER: ("_total",),
            MetricType.GAUGE: ("",),
            MetricType.HISTOGRAM: ("_bucket", "_sum", "_count"),
        }[self.type]
        return tuple(self.family + suffix for suffix in suffixes)


def _counter(name: str, unit: str, labels: tuple[str, ...], help: str) -> Metric:
    return Metric(name, MetricType.COUNTER, unit, labels, help)


def _gauge(name: str, unit: str, labels: tuple[str, ...], help: str) -> Metric:
    return Metric(name, MetricType.GAUGE, unit, labels, help)


def _histogram(name: str, unit: str, labels: tuple[str, ...], buckets: tuple[float, ...], help: str) -> Metric:
    return Metric(name, MetricType.HISTOGRAM, unit, labels, help, buckets)


PAIR = ("drafter", "target")
TARGET = ("target",)
DRAFTER = ("drafter",)
WORKER = ("role", "name", "worker")

TOKEN_BUCKETS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 11.0, 13.0, 17.0, 25.0, 33.0)
DRAFT_LENGTH_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0)
STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.5, 1.0, 5.0)
QUEUE_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# OpenTelemetry semantic conventions for generative AI, "Model server metrics".
FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)

SPECULATION = (
    _counter("spec_decode_num_drafts", "drafts", PAIR, "Verifications that had at least one draft token."),
    _counter("spec_decode_num_draft_tokens", "tokens", PAIR, "Draft tokens that were verified."),
    _counter(
        "spec_decode_num_accepted_tokens",
        "tokens",
        PAIR,
        "Draft tokens that were accepted; corrections and bonus tokens are not among them.",
    ),
    _counter(
        "spec_decode_num_draft_tokens_per_pos",
        "drafts",
        (*PAIR, "position"),
        "Verifications whose drafts reached this position; 0 is the first.",
    ),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "tokens",
        (*PAIR, "position"),
        "Draft tokens that were accepted at this position; 0 is the first.",
    ),
    _histogram(
        "spec_decode_accepted_length",
        "tokens",
        PAIR,
        TOKEN_BUCKETS,
        "Accepted draft tokens and the target's own one, of each verification that had drafts.",
    ),
    _histogram(
        "spec_decode_draft_length",
        "tokens",
        TARGET,
        DRAFT_LENGTH_BUCKETS,
        "The draft length that was chosen for each verification; 0 is plain decoding.",
    ),
    _counter("looked_up_tokens", "tokens", TARGET, "Draft tokens that the target looked up in the text itself."),
    _counter(
        "fallback_rounds", "rounds", TARGET, "Verifications of sequences that wanted drafts and had no drafter to ask."
    ),
    _counter("ahead_hits", "drafts", DRAFTER, "Proposals that were ready because they were drafted ahead."),
    _counter("ahead_misses", "drafts", DRAFTER, "Proposals that were drafted ahead for an outcome that did not come."),
    _counter("late_drafts", "drafts", (), "Proposals that came too late for the round that had asked for them."),
    _gauge("drafter_benched", "boolean", ("drafter", "worker"), "1 while the drafter is left out as too costly."),
    _counter("drafter_benchings", "events", DRAFTER, "Times that a drafter was left out as too costly."),
)

ROUNDS = (
    _histogram("round_seconds", "seconds", TARGET, STEP_BUCKETS, "Whole rounds."),
    _histogram("round_draft_wait_seconds", "seconds", TARGET, STEP_BUCKETS, "Of a round: the wait for drafts."),
    _histogram(
        "round_verify_queue_seconds",
        "seconds",
        TARGET,
        STEP_BUCKETS,
        "Of a round: the wait for the verification beyond its computation: its turn at the target, and the way there.",
    ),
    _histogram("round_verify_seconds", "seconds", TARGET, STEP_BUCKETS, "Of a round: the target's computation."),
    _histogram("round_overhead_seconds", "seconds", TARGET, STEP_BUCKETS, "Of a round: all else, the router's own."),
    _histogram("draft_seconds", "seconds", DRAFTER, STEP_BUCKETS, "A drafter's computation for one round's drafts."),
    _counter("verifications", "verifications", TARGET, "Verifications of one sequence each, with and without drafts."),
    _counter("decode_seconds", "seconds", TARGET, "Time of rounds that read no prompt; plain_decode_seconds compares."),
    _counter(
        "plain_decode_seconds",
        "seconds",
        TARGET,
        "What the tokens of decode_seconds would have taken without drafts, by the step times that the target showed.",
    ),
)

REQUESTS = (
    _gauge("num_requests_running", "sequences", (), "Sequences of clients that have a target."),
    _gauge("num_requests_waiting", "sequences", (), "Sequences of clients that wait for a target."),
    _counter(
        "requests",
        "sequences",
        ("outcome",),
        "Sequences that ended, each choice of a request by itself: stop, length, cancelled, or the code of the error.",
    ),
    _counter("prompt_tokens", "tokens", (), "Prompt tokens of sequences that ended well."),
    _counter("cached_prompt_tokens", "tokens", (), "Of prompt_tokens, those that the target had cached."),
    _counter("generation_tokens", "tokens", TARGET, "Tokens that were committed."),
    _counter("num_preemptions", "events", (), "Times that a sequence gave up its KV blocks to older ones."),
    _histogram(
        "request_queue_seconds", "seconds", (), QUEUE_BUCKETS, "From a sequence's arrival to its place on a target."
    ),
    _histogram("time_to_first_token_seconds", "seconds", (), FIRST_TOKEN_BUCKETS, "From arrival to the first tokens."),
    _histogram(
        "time_per_output_token_seconds",
        "seconds",
        (),
        PER_TOKEN_BUCKETS,
        "Of sequences that ended well: the time behind the first tokens, divided by the tokens behind the first one.",
    ),
    _histogram(
        "inter_chunk_seconds", "seconds", (), STEP_BUCKETS, "Between one delivery of tokens and the next of a sequence."
    ),
    _histogram(
        "request_duration_seconds",
        "seconds",
        (),
        DURATION_BUCKETS,
        "From arrival to the end, of those that ended well.",
    ),
)

WORKERS = (
    _gauge("workers", "workers", ("role",), "Registered workers that draft or verify."),
    _counter("worker_failures", "events", ("role",), "Workers that were taken out of service because they failed."),
    _gauge("kv_blocks_used", "blocks", WORKER, "KV blocks that sequences hold."),
    _gauge("kv_blocks_total", "blocks", WORKER, "KV blocks there are."),
    _gauge("kv_blocks_cached", "blocks", WORKER, "KV blocks with prefixes that may be shared, in use or not."),
    _gauge("worker_sequences", "sequences", WORKER, "Sequences whose KV the worker holds."),
    _counter("prefix_cache_queries", "tokens", WORKER, "Tokens looked up in the prefix cache."),
    _counter("prefix_cache_hits", "tokens", WORKER, "Tokens found in the prefix cache."),
)

ONLINE_CHECK = (
    _counter("online_check_checked", "requests", (), "Finished requests that were decoded again without drafts."),
    _counter("online_check_mismatched", "requests", (), "Of those, requests whose tokens differed. Must stay 0."),
    _counter("online_check_compared_tokens", "tokens", (), "Tokens that were compared."),
    _counter("online_check_skipped", "requests", (), "Chosen requests that had nothing to compare."),
    _counter("online_check_dropped", "requests", (), "Checks that found no room in time, or failed."),
    _counter("online_check_postponed", "events", (), "Times that a check made room for a client."),
    _gauge("online_check_pending", "requests", (), "Checks that wait or run."),
)

CATALOGUE: tuple[Metric, ...] = (*SPECULATION, *ROUNDS, *REQUESTS, *WORKERS, *ONLINE_CHECK)
BY_NAME = {metric.name: metric for metric in CATALOGUE}
