"""The application builder: `import_path: deployments.app:build_app` in a Serve config file."""

from typing import Any

from ray import serve
from ray.serve import Application

from cluster.topology import PLACEMENT_STRATEGY
from deployments.autoscaler import DRAFTERS, INGRESS, ROUTER, TARGETS
from deployments.autoscaling_config import PoolAutoscaling
from deployments.autoscaling_policy import serve_autoscaling
from deployments.config import IngressSection, LeadoutConfig, WorkerSection, parse_config
from deployments.ingress import Ingress
from deployments.planning import ServingLimits
from deployments.pools import DraftPool, TargetPool
from deployments.preflight import ServedModel, check_deployment, resolve_models
from workers.router.actor import RouterActor

# Requests are admitted by the router, with its own limits; Serve must not queue in front of it.
UNLIMITED_REQUESTS = 1_000_000
# Beyond what requests are given: to move them, and to end processes.
SHUTDOWN_MARGIN_S = 15.0
SHUTDOWN_POLL_S = 0.5
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
    grace_s, telemetry = config.ingress.graceful_shutdown_timeout_s, config.telemetry.worker_config()
    router = serve.deployment(
        RouterActor,
        name="Router",
        ray_actor_options=_without_cpu(config.router.node_labels),
        max_ongoing_requests=UNLIMITED_REQUESTS,
        logging_config=WITHOUT_ACCESS_LOG,
        # Requests wait for the next router; Serve's own 10 s would be most of their pause.
        health_check_period_s=2,
        **_graceful(grace_s),
        **_router_replicas(config),
    ).bind(
        config.router_config(),
        model.tokenizer_json,
        config.router.link,
        telemetry,
        config.request_log.worker_config(),
    )

    def pool(kind: type, name: str, section: WorkerSection, processes: int, replicas: dict[str, Any]) -> Any:
        options = _graceful(grace_s) | replicas
        deployment = _pool(kind, name, section, processes, start_attempts, options)
        return deployment.bind(section, router, config.worker_load_timeout_s, grace_s, telemetry)

    ranks = config.target.tensor_parallel_size
    targets = pool(TargetPool, "TargetPool", config.target, ranks, _replicas(config, TARGETS, config.target))
    drafters = [
        pool(DraftPool, f"DraftPool-{section.name}", section, 1, _replicas(config, DRAFTERS + section.name, section))
        for section in config.drafters
        if section.most_replicas > 0
    ]
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        ray_actor_options=_without_cpu(config.ingress.node_labels),
        max_ongoing_requests=UNLIMITED_REQUESTS,
        graceful_shutdown_timeout_s=grace_s,
        graceful_shutdown_wait_loop_s=SHUTDOWN_POLL_S,
        **_replicas(config, INGRESS, config.ingress),
    )
    limits = serving_limits(config, model)
    return ingress.bind(config.target.model, limits, grace_s, router, [targets, *drafters], telemetry)


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
        most_sequences=config.router.max_running_sequences + config.router.max_waiting_sequences,
    )


def _without_cpu(node_labels: dict[str, str]) -> dict[str, Any]:
    """Actor options of what needs no CPU of its own, which Ray would otherwise put on any node."""
    return {"num_cpus": 0} | ({"label_selector": node_labels} if node_labels else {})


def _graceful(grace_s: float) -> dict[str, Any]:
    """Serve's options for what must outlast requests that have `grace_s` seconds."""
    return {
        "graceful_shutdown_timeout_s": grace_s + SHUTDOWN_MARGIN_S,
        "graceful_shutdown_wait_loop_s": SHUTDOWN_POLL_S,
    }


def _replicas(config: LeadoutConfig, pool: str, section: WorkerSection | IngressSection) -> dict[str, Any]:
    """Return Serve's options for a fixed number of replicas, or for one that follows the load."""
    if section.autoscaling is None:
        return {"num_replicas": section.replicas}
    return _autoscaled(config, pool, section.autoscaling)


def _router_replicas(config: LeadoutConfig) -> dict[str, Any]:
    """One router; where anything scales, it tells Serve's controller its load."""
    return {} if config.autoscaling_settings() is None else _autoscaled(config, ROUTER, None)


def _autoscaled(config: LeadoutConfig, pool: str, section: PoolAutoscaling | None) -> dict[str, Any]:
    settings = config.autoscaling_settings()
    assert settings is not None
    return {"autoscaling_config": serve_autoscaling(pool, section, settings, config.autoscaling.interval_s)}


def _pool(
    pool: type, name: str, section: WorkerSection, processes: int, start_attempts: int, options: dict[str, Any]
) -> Any:
    """A supervisor needs no CPU of its own; its placement group holds one bundle per worker process."""
    return serve.deployment(
        pool,
        name=name,
        ray_actor_options={"num_cpus": 0},
        placement_group_bundles=[section.worker_resources()] * processes,
        placement_group_strategy=PLACEMENT_STRATEGY,
        placement_group_bundle_label_selector=[section.node_labels] if section.node_labels else None,
        health_check_period_s=5,
        health_check_timeout_s=15,
        max_constructor_retry_count=start_attempts,
        logging_config=WITHOUT_ACCESS_LOG,
        **options,
    )
