"""The application builder: `import_path: deployments.app:build_app` in a Serve config file."""

from typing import Any

from ray import serve
from ray.serve import Application

from deployments.config import LeadoutConfig, WorkerSection, parse_config
from deployments.ingress import Ingress
from deployments.planning import ServingLimits
from deployments.pools import DraftPool, TargetPool
from deployments.preflight import ServedModel, check_deployment, resolve_models
from workers.router.actor import RouterActor

# Requests are admitted by the router, with its own limits; Serve must not queue in front of it.
UNLIMITED_REQUESTS = 1_000_000
STREAM_DRAIN_TIMEOUT_S = 30.0
# Workers register with the router every second; a line for each would bury everything else.
WITHOUT_ACCESS_LOG = {"enable_access_log": False}


def build_app(args: dict[str, Any]) -> Application:
    """Build the application from the `args` of a Serve config.

    Raises ConfigurationError, one line, before anything starts: unknown keys, impossible values, missing models,
    pairs that do not match.
    """
    config = resolve_models(parse_config(args))
    return wire(config, check_deployment(config))


def wire(config: LeadoutConfig, model: ServedModel, start_attempts: int = 3) -> Application:
    """Bind the deployments to each other: the router knows nobody, pools register with it, the ingress calls it.

    A pool whose worker cannot be loaded is given up after `start_attempts` tries.
    """
    router = serve.deployment(
        RouterActor,
        name="Router",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=UNLIMITED_REQUESTS,
        logging_config=WITHOUT_ACCESS_LOG,
    ).bind(
        config.router_config(),
        model.tokenizer_json,
        config.router.link,
        config.telemetry.worker_config(),
        config.request_log.worker_config(),
    )
    targets = _pool(TargetPool, "TargetPool", config.target, config.target.tensor_parallel_size, start_attempts).bind(
        config.target, router, config.worker_load_timeout_s, config.telemetry.worker_config()
    )
    drafters = [
        _pool(DraftPool, f"DraftPool-{section.name}", section, 1, start_attempts).bind(
            section, router, config.worker_load_timeout_s, config.telemetry.worker_config()
        )
        for section in config.drafters
        if section.replicas > 0
    ]
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=config.ingress.replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=UNLIMITED_REQUESTS,
        graceful_shutdown_timeout_s=STREAM_DRAIN_TIMEOUT_S,
    )
    return ingress.bind(
        config.target.model,
        serving_limits(config, model),
        router,
        [targets, *drafters],
        config.telemetry.worker_config(),
    )


def serving_limits(config: LeadoutConfig, model: ServedModel) -> ServingLimits:
    """Return what the ingress checks requests against."""
    return ServingLimits(
        served_model_name=config.target.served_name,
        context_length=model.context_length,
        vocabulary_size=model.vocabulary_size,
        request_timeout_s=config.ingress.request_timeout_s,
        max_body_bytes=config.ingress.max_body_bytes,
        drafter_names=tuple(section.name for section in config.drafters),
        max_draft_tokens=config.speculation.max_draft_tokens,
        access=config.ingress.access_rules(),
    )


def _pool(pool: type, name: str, section: WorkerSection, processes: int, start_attempts: int) -> Any:
    """A supervisor needs no CPU of its own; its placement group holds one bundle per worker process."""
    return serve.deployment(
        pool,
        name=name,
        num_replicas=section.replicas,
        ray_actor_options={"num_cpus": 0},
        placement_group_bundles=[section.worker_resources()] * processes,
        placement_group_strategy="STRICT_PACK",
        health_check_period_s=5,
        health_check_timeout_s=15,
        graceful_shutdown_timeout_s=STREAM_DRAIN_TIMEOUT_S,
        max_constructor_retry_count=start_attempts,
        logging_config=WITHOUT_ACCESS_LOG,
    )
