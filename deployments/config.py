"""The deployment's configuration: the `args` of the Serve config file, validated once and then trusted."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.autoscaling import ApplicationSettings
from cluster.shards import Sharding
from deployments.access import AccessRules
from deployments.api_keys import read_keys
from deployments.autoscaling_config import (
    AutoscalingSection,
    DrafterAutoscaling,
    IngressAutoscaling,
    PoolAutoscaling,
    TargetAutoscaling,
)
from deployments.node_labels import NodeLabels
from deployments.telemetry import RequestLogSection, TelemetrySection
from workers.drafters.registry import DrafterKind, DrafterSpec
from workers.emulated.timing import DrafterTiming, TargetTiming
from workers.engine.config import EngineConfig
from workers.errors import ConfigurationError
from workers.links.base import LinkChoice
from workers.messages import Verification
from workers.router.config import RouterConfig
from workers.router.draft_length import DraftLengthName

DataType = Literal["float32", "bfloat16", "float16"]
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Scalable(_Section):
    """What Serve runs several replicas of: as many as `replicas` says, or as many as it takes."""

    replicas: int = Field(1, ge=0)
    autoscaling: PoolAutoscaling | None = Field(None, description="as many as it takes, instead of `replicas`")

    @model_validator(mode="after")
    def _has_one_number(self) -> "_Scalable":
        if self.autoscaling is not None and "replicas" in self.model_fields_set:
            raise ValueError("replicas and autoscaling exclude each other")
        return self

    @property
    def first_replicas(self) -> int:
        """How many there are at the start."""
        return self.replicas if self.autoscaling is None else self.autoscaling.first_replicas

    @property
    def most_replicas(self) -> int:
        """How many there may ever be."""
        return self.replicas if self.autoscaling is None else self.autoscaling.max_replicas


class EmulatedTargetSection(_Section):
    """The time of another device, for measuring schedules; text and acceptance stay the model's own."""

    base_ms: float = Field(30.0, ge=0, description="a step; the default is like 70B over four A100s")
    token_ms: float = Field(0.1, ge=0, description="for each token that the step reads")


class EmulatedDrafterSection(_Section):
    """The time of another device, for measuring schedules; the drafts stay the model's own."""

    step_ms: float = Field(4.0, ge=0, description="a pass, of which a draft takes one; the default is like 1B on an L4")
    row_ms: float = Field(0.02, ge=0, description="for each sequence of a pass")
    read_token_ms: float = Field(0.02, ge=0, description="for each further token that is read")


class WorkerSection(_Scalable):
    """What target and drafters have in common: a model, and the device that runs it."""

    model: str = Field(min_length=1, description="Hugging Face id, local folder or GGUF file")
    dtype: DataType = "bfloat16"
    device: str = Field("auto", description="auto, cpu, cuda")
    kv_cache_gib: float = Field(1.0, gt=0, description="memory of the KV pool, per rank")
    max_context_tokens: int | None = Field(None, ge=16, description="cap below the model's own context")
    prefix_caching: bool = Field(True, description="keep KV of ended sequences for prompts that begin like them")
    threads: int | None = Field(None, ge=1, description="CPU threads; default: as many as num_cpus")
    quantization: Literal["none", "int8", "nf4", "auto"] = Field("none", description="of linear layers; auto: drafters")
    allow_pickled_weights: bool = Field(False, description="also read pytorch_model.bin, which can run code")
    trust_remote_code: bool = Field(False, description="run code that comes with the model")
    num_cpus: float = Field(1.0, ge=0, description="Ray CPUs per worker process")
    num_gpus: float = Field(0.0, ge=0, description="Ray GPUs per worker process")
    node_labels: NodeLabels = Field(default_factory=dict, description="labels of the nodes that workers may run on")

    @model_validator(mode="after")
    def _needs_a_resource(self) -> "WorkerSection":
        if self.num_cpus == 0 and self.num_gpus == 0:
            raise ValueError("num_cpus and num_gpus cannot both be 0")
        return self

    def engine_config(self, tensor_parallel_size: int = 1) -> EngineConfig:
        """Return what the worker's engine needs."""
        return EngineConfig(
            model=self.model,
            dtype=self.dtype,
            # Ray does not hide GPUs from a process that asked for none.
            device="cpu" if self.device == "auto" and self.num_gpus == 0 else self.device,
            kv_cache_gib=self.kv_cache_gib,
            max_context_tokens=self.max_context_tokens,
            prefix_caching=self.prefix_caching,
            tensor_parallel_size=tensor_parallel_size,
            threads=self.threads,
            quantization=self.quantization,
            allow_pickled_weights=self.allow_pickled_weights,
            trust_remote_code=self.trust_remote_code,
        )

    def worker_resources(self) -> dict[str, float]:
        """Return Ray's resources of one worker process."""
        return {key: value for key, value in (("CPU", self.num_cpus), ("GPU", self.num_gpus)) if value}


class TargetSection(WorkerSection):
    """The large model. One replica is a tensor-parallel group of `tensor_parallel_size` processes."""

    name: Name | None = Field(None, description="the model name clients use; default: the folder's or id's last part")
    tensor_parallel_size: int = Field(1, ge=1)
    replicas: int = Field(1, ge=1)
    autoscaling: TargetAutoscaling | None = None
    emulated: EmulatedTargetSection | None = Field(None, description="take this time instead of the device's own")

    @model_validator(mode="after")
    def _quantisation_is_chosen_and_of_one_process(self) -> "TargetSection":
        if self.quantization == "auto":
            raise ValueError("quantization auto is for drafters; choose none, int8 or nf4 for a target")
        if self.quantization != "none" and self.tensor_parallel_size > 1:
            raise ValueError(
                f"quantization {self.quantization} cannot be used with tensor_parallel_size {self.tensor_parallel_size}"
            )
        return self

    def engine_config(self, tensor_parallel_size: int = 1) -> EngineConfig:
        """Return what one rank's engine needs."""
        timing = None if self.emulated is None else TargetTiming(**self.emulated.model_dump())
        return replace(super().engine_config(tensor_parallel_size), emulated=timing)

    @property
    def served_name(self) -> str:
        """The model name that clients use."""
        return self.name or Path(self.model).name


class DrafterSection(WorkerSection):
    """One kind of drafter; requests may choose it by `name`."""

    name: Name
    kind: DrafterKind = "model"
    autoscaling: DrafterAutoscaling | None = None
    emulated: EmulatedDrafterSection | None = Field(None, description="take this time instead of the device's own")

    def engine_config(self, tensor_parallel_size: int = 1) -> EngineConfig:
        """Return what the drafter's engine needs."""
        return replace(super().engine_config(tensor_parallel_size), quantised_output=True)

    def spec(self) -> DrafterSpec:
        """Return what the draft worker loads."""
        timing = None if self.emulated is None else DrafterTiming(**self.emulated.model_dump())
        return DrafterSpec(self.kind, self.engine_config(), timing)


class SpeculationSection(_Section):
    """How much to draft, and how much of what came of it to check."""

    max_draft_tokens: int = Field(8, ge=0, le=32, description="the longest draft; 0 is plain decoding")
    draft_length_policy: DraftLengthName = Field(
        "goodput", description="how many tokens to draft, up to the longest draft"
    )
    draft_ahead: bool = Field(True, description="drafters go on while the target verifies, where they have time to")
    max_cohorts: int = Field(2, ge=1, le=8, description="cohorts of one target that may be under way at a time")
    grouping: Literal["acceptance", "random"] = Field("acceptance", description="random: to see what grouping is worth")
    fallback: Literal["prompt_lookup", "none"] = Field(
        "prompt_lookup", description="drafts for sequences without a drafter: looked up in their own text, or none"
    )
    verification: Literal["coupled", "ratio"] = Field(
        "coupled", description="for requests that do not choose; ratio gives up that drafts cannot change the text"
    )
    bench_drafters: bool = Field(True, description="leave a drafter out whose drafts cost more than they bring")
    check_share: float = Field(0.0, ge=0, le=1, description="of finished requests, decoded again without drafts")
    check_max_pending: int = Field(16, ge=1, le=1024, description="checks that may wait for idle capacity")
    check_timeout_s: float = Field(60.0, gt=0, description="a check that takes longer, its wait included, is dropped")


class RouterSection(_Section):
    """Admission, batching and deadlines; of several routers, of each."""

    replicas: int = Field(1, ge=1, description="routers, each with targets and drafters of its own")
    max_running_sequences: int = Field(64, ge=1)
    max_waiting_sequences: int = Field(256, ge=0)
    max_batch_sequences: int = Field(32, ge=1)
    prefill_chunk_tokens: int = Field(512, ge=16, le=16_384)
    prefill_latency_factor: float = Field(
        2.0, gt=1, description="how much longer a step may take beside decoding sequences because it reads prompts"
    )
    queue_timeout_s: float = Field(60.0, gt=0)
    propose_deadline_s: float = Field(10.0, gt=0)
    verify_deadline_s: float = Field(60.0, gt=0)
    link: LinkChoice = Field("auto", description="what carries messages to workers; auto: zmq, or ray where it fails")
    node_labels: NodeLabels = Field(default_factory=dict, description="labels of the nodes that the router may run on")


class IngressSection(_Scalable):
    """The HTTP side."""

    replicas: int = Field(1, ge=1)
    autoscaling: IngressAutoscaling | None = None
    request_timeout_s: float = Field(600.0, gt=0)
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1024)
    body_timeout_s: float = Field(30.0, gt=0, description="a body that takes longer to arrive is refused")
    api_keys_file: str | None = Field(None, min_length=1, description="file with digests of the keys that are let in")
    api_keys_env: str | None = Field(None, min_length=1, description="environment variable with the same lines")
    max_concurrent_per_key: int | None = Field(None, ge=1, description="requests in progress, per ingress process")
    node_labels: NodeLabels = Field(default_factory=dict, description="labels of the nodes that it may run on")
    graceful_shutdown_timeout_s: float = Field(
        120.0,
        ge=0,
        description="for requests in progress when their replica, or the service, is stopped",
    )

    def access_rules(self) -> AccessRules:
        """Return who is let in; reads the keys. ConfigurationError if they cannot be read."""
        keys = read_keys(self.api_keys_file, self.api_keys_env)
        return AccessRules(keys, self.max_concurrent_per_key, self.body_timeout_s)


class LeadoutConfig(_Section):
    """Everything a deployment is told."""

    target: TargetSection
    drafters: list[DrafterSection] = Field(default_factory=list)
    speculation: SpeculationSection = SpeculationSection()
    router: RouterSection = RouterSection()
    ingress: IngressSection = IngressSection()
    autoscaling: AutoscalingSection = AutoscalingSection()
    telemetry: TelemetrySection = TelemetrySection()
    request_log: RequestLogSection = RequestLogSection()
    worker_load_timeout_s: float = Field(600.0, gt=0)

    @model_validator(mode="after")
    def _drafter_names_differ(self) -> "LeadoutConfig":
        names = [drafter.name for drafter in self.drafters]
        if duplicates := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"drafters: the name {sorted(duplicates)[0]!r} is used more than once")
        return self

    @model_validator(mode="after")
    def _every_router_has_a_target(self) -> "LeadoutConfig":
        scaling, routers = self.target.autoscaling, self.router.replicas
        key = "target.replicas" if scaling is None else "target.autoscaling.min_replicas"
        least = self.target.replicas if scaling is None else scaling.min_replicas
        if least < routers:
            raise ValueError(f"{key} {least} is below router.replicas {routers}: each router needs a target of its own")
        return self

    def sharding(self) -> Sharding:
        """Return how workers are dealt out to routers."""
        return Sharding(self.router.replicas, self.target.replicas if self.target.autoscaling is None else None)

    def router_config(self) -> RouterConfig:
        """Return what each router needs."""
        speculation = self.speculation.model_dump()
        speculation["verification"] = Verification(self.speculation.verification)
        limits = self.router.model_dump(exclude={"replicas", "link", "node_labels"})
        return RouterConfig(**speculation, **limits, load_window_s=self.autoscaling.window_s)

    def autoscaling_settings(self) -> ApplicationSettings | None:
        """Return what the pools that scale are to do; None if none does."""
        drafters = {each.name: each.autoscaling.settings() for each in self.drafters if each.autoscaling is not None}
        target, ingress = self.target.autoscaling, self.ingress.autoscaling
        if not drafters and target is None and ingress is None:
            return None
        return ApplicationSettings(
            None if target is None else target.settings(), drafters, None if ingress is None else ingress.settings()
        )


def parse_config(arguments: object) -> LeadoutConfig:
    """Validate the `args` of a Serve config. Raises ConfigurationError: one line, every wrong key named."""
    try:
        return LeadoutConfig.model_validate(arguments)
    except ValidationError as error:
        problems = [f"{_key(problem['loc'])}: {problem['msg']}" for problem in error.errors(include_url=False)]
        raise ConfigurationError("; ".join(problems)) from error


def _key(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or "args"
