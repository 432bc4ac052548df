"""What an operator asks of each pool. Times as their names say."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """Bounds of a pool, and for how long it must want to change before it does.

    A replica counts once it has run for `warm_up_s`: before, what is measured says nothing of it.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    warm_up_s: float = 30.0

    def clipped(self, replicas: int) -> int:
        """Return `replicas` within the bounds."""
        return max(self.min_replicas, min(self.max_replicas, replicas))


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """Objectives (95th percentiles) of the service and the KV use that targets should not exceed on average.

    `sequences_per_target` is how many sequences one target is expected to serve within them; what is observed corrects
    it.
    """

    limits: ScalingLimits = ScalingLimits()
    queue_wait_ms: float = 1_000.0
    ttft_ms: float = 3_000.0
    itl_ms: float = 150.0
    kv_use: float = 0.8
    sequences_per_target: float = 32.0


@dataclass(frozen=True, slots=True)
class DrafterSettings:
    """When drafters are too few, and when they are of no use.

    More are wanted where rounds wait for drafts for more than the share `exposed_wait` of their time, or more than the
    share `late_drafts` of proposals comes too late; there are `least_per_target` to `most_per_target` of them for each
    target. Where fewer than `least_draft_tokens` are drafted per verification speculation does not pay, and they go;
    they are tried again when the load has fallen, or after `retry_s`, which doubles with each trial in vain.
    """

    limits: ScalingLimits = ScalingLimits(min_replicas=0)
    exposed_wait: float = 0.2
    late_drafts: float = 0.05
    least_draft_tokens: float = 0.5
    least_per_target: float = 0.5
    most_per_target: float = 2.0
    retry_s: float = 300.0


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """How many open streams one ingress process should serve."""

    limits: ScalingLimits = ScalingLimits()
    streams_per_replica: float = 100.0
