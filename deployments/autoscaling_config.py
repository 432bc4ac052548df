"""The `autoscaling` sections of the configuration: a pool that has one is scaled between its bounds."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cluster.autoscaling import DrafterSettings, IngressSettings, ScalingLimits, TargetSettings

_LIMITS = ("min_replicas", "max_replicas", "upscale_delay_s", "downscale_delay_s", "warm_up_s")
Share = Annotated[float, Field(gt=0, le=1)]


class PoolAutoscaling(BaseModel):
    """Bounds and delays of one pool."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(ge=1)
    upscale_delay_s: float = Field(10.0, ge=0, description="how long more must have been wanted without a break")
    downscale_delay_s: float = Field(300.0, ge=0, description="how long fewer must have been wanted without a break")
    warm_up_s: float = Field(30.0, ge=0, description="how long a replica runs before it counts")

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "PoolAutoscaling":
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is below min_replicas {self.min_replicas}")
        return self

    @property
    def first_replicas(self) -> int:
        """How many there are at the start."""
        return max(1, self.min_replicas)

    def limits(self) -> ScalingLimits:
        """Return what all policies have in common."""
        return ScalingLimits(**self.model_dump(include=set(_LIMITS)))


class TargetAutoscaling(PoolAutoscaling):
    """Objectives are 95th percentiles; what misses one asks for more targets."""

    queue_wait_ms: float = Field(1_000.0, gt=0, description="from a request's arrival to its place on a target")
    ttft_ms: float = Field(3_000.0, gt=0, description="from a request's arrival to its first token")
    itl_ms: float = Field(150.0, gt=0, description="between tokens")
    kv_use: Share = Field(0.8, description="of targets' KV blocks, on average")
    sequences_per_target: float = Field(32.0, gt=0, description="a first guess; what is observed corrects it")

    def settings(self) -> TargetSettings:
        """Return what the policy needs."""
        return TargetSettings(self.limits(), **self.model_dump(exclude=set(_LIMITS)))


class DrafterAutoscaling(PoolAutoscaling):
    """Drafters follow the wait that rounds see, in proportion to targets, and go where speculation does not pay."""

    min_replicas: int = Field(0, ge=0)
    exposed_wait: Share = Field(0.2, description="share of rounds' time waited for drafts; above it there are too few")
    late_drafts: Share = Field(0.05, description="share of proposals that come too late; above it there are too few")
    least_draft_tokens: float = Field(0.5, ge=0, description="per verification; below it drafters are useless")
    least_per_target: float = Field(0.5, ge=0, description="drafters for each target, while they are of use")
    most_per_target: float = Field(2.0, gt=0, description="drafters for each target at most")
    retry_s: float = Field(300.0, gt=0, description="until useless drafters are tried again; doubles each time")

    @model_validator(mode="after")
    def _proportions_are_in_order(self) -> "DrafterAutoscaling":
        if self.most_per_target < self.least_per_target:
            raise ValueError(
                f"most_per_target {self.most_per_target} is below least_per_target {self.least_per_target}"
            )
        return self

    def settings(self) -> DrafterSettings:
        """Return what the policy needs."""
        return DrafterSettings(self.limits(), **self.model_dump(exclude=set(_LIMITS)))


class IngressAutoscaling(PoolAutoscaling):
    """Ingress processes follow the streams that are open."""

    streams_per_replica: float = Field(100.0, gt=0)

    def settings(self) -> IngressSettings:
        """Return what the policy needs."""
        return IngressSettings(self.limits(), **self.model_dump(exclude=set(_LIMITS)))


class AutoscalingSection(BaseModel):
    """How the load is measured by which pools scale."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    interval_s: float = Field(5.0, gt=0, description="how often the router tells its load")
    window_s: float = Field(30.0, gt=0, description="how far percentiles and shares look back")
