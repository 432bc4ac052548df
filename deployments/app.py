"""The application builder: `import_path: deployments.app:build_app` in a Serve config file."""

from typing import Any

from ray import serve
from ray.serve import Application

from cluster.topology import PLACEMENT_STRATEGY
from deployments.autoscaler import DRAFTERS, INGRESS, ROUTER, TARGETS, PoolOfRouter
from deployments.autoscaling_policy import serve_autoscaling
from deployments.config import DrafterSection, IngressSection, LeadoutConfig, WorkerSection, parse_config
from deployments.ingress import Ingress
from deployments.local_cluster import ROUTER_NAME
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
    """Bind the deployments to each other: routers know nobody, pools register with theirs, the ingress calls them.

    Several routers have a share of the targets and drafters each, as deployments of their own: so Serve sees to it that
    each keeps its share. A pool whose worker cannot be loaded is given up after `start_attempts` tries.
    """
    routers = [_router(config, model, index) for index in range(config.router.replicas)]
    pools = [pool for index, router in enumerate(routers) for pool in _pools_of(config, router, index, start_attempts)]
    grace_s = config.ingress.graceful_shutdown_timeout_s
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        ray_actor_options=_without_cpu(config.ingress.node_labels),
        max_ongoing_requests=UNLIMITED_REQUESTS,
        graceful_shutdown_timeout_s=grace_s,
        graceful_shutdown_wait_loop_s=SHUTDOWN_POLL_S,
        **_replicas(config, INGRESS, config.ingress),
    )
    limits, telemetry = serving_limits(config, model), config.telemetry.worker_config()
    return ingress.bind(config.target.model, limits, grace_s, routers, pools, telemetry)


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
        most_sequences=(config.router.max_running_sequences + config.router.max_waiting_sequences)
        * config.router.replicas,
        most_running=config.router.max_running_sequences,
    )


def _router(config: LeadoutConfig, model: ServedModel, index: int) -> Any:
    name = _name(config, ROUTER_NAME, index)
    deployment = serve.deployment(
        RouterActor,
        name=name,
        ray_actor_options=_without_cpu(config.router.node_labels),
        max_ongoing_requests=UNLIMITED_REQUESTS,
        logging_config=WITHOUT_ACCESS_LOG,
        # Requests wait for the next router; Serve's own 10 s would be most of their pause.
        health_check_period_s=2,
        **_graceful(config.ingress.graceful_shutdown_timeout_s),
        **_router_replicas(config, index),
    )
    return deployment.bind(
        config.router_config(),
        model.tokenizer_json,
        config.router.link,
        config.telemetry.worker_config(),
        config.request_log.worker_config(),
        name if config.router.replicas > 1 else None,
    )


def _pools_of(config: LeadoutConfig, router: Any, index: int, start_attempts: int) -> list[Any]:
    """Return the pools of one router: its share of the targets, and of each kind of drafter that it gets any of."""
    grace_s, telemetry = config.ingress.graceful_shutdown_timeout_s, config.telemetry.worker_config()

    def pool(
        kind: type, name: str, section: WorkerSection, processes: int, options: dict[str, Any], *more: object
    ) -> Any:
        options = _graceful(grace_s) | options
        deployment = _pool(kind, _name(config, name, index), section, processes, start_attempts, options)
        return deployment.bind(section, router, config.worker_load_timeout_s, grace_s, telemetry, *more)

    ranks, replicas = config.target.tensor_parallel_size, _replicas(config, TARGETS, config.target, index)
    pools = [pool(TargetPool, "TargetPool", config.target, ranks, replicas)]
    for section in config.drafters:
        replicas = _replicas(config, DRAFTERS + section.name, section, index)
        if replicas.get("num_replicas") != 0:
            # An empty `user_config` is what a replica begins with, and what an update puts others in place of.
            options = {"user_config": {}, **replicas}
            pools.append(pool(DraftPool, f"DraftPool-{section.name}", section, 1, options, config.target.model))
    return pools


def _name(config: LeadoutConfig, name: str, index: int) -> str:
    """Return the deployment's name, which tells several routers, and their pools, apart."""
    return name if config.router.replicas == 1 else f"{name}-{index}"


def _without_cpu(node_labels: dict[str, str]) -> dict[str, Any]:
    """Actor options of what needs no CPU of its own, which Ray would otherwise put on any node."""
    return {"num_cpus": 0} | ({"label_selector": node_labels} if node_labels else {})


def _graceful(grace_s: float) -> dict[str, Any]:
    """Serve's options for what must outlast requests that have `grace_s` seconds."""
    return {
        "graceful_shutdown_timeout_s": grace_s + SHUTDOWN_MARGIN_S,
        "graceful_shutdown_wait_loop_s": SHUTDOWN_POLL_S,
    }


def _replicas(
    config: LeadoutConfig, pool: str, section: WorkerSection | IngressSection, index: int = 0
) -> dict[str, Any]:
    """Return Serve's options for a fixed number of replicas, or for one that follows the load, at a router."""
    scaling = section.autoscaling
    if scaling is None:
        return {"num_replicas": _share(config, section, section.first_replicas, index)}
    least, first, most = (
        _share(config, section, count, index)
        for count in (scaling.min_replicas, scaling.first_replicas, scaling.max_replicas)
    )
    if isinstance(section, DrafterSection) and config.router.replicas > 1:
        # Their share changes with that of the targets: the bounds are kept by the policy, for all routers together.
        least, most = 0, scaling.max_replicas
    return _autoscaled(config, pool, (least, first, most), index)


def _share(config: LeadoutConfig, section: WorkerSection | IngressSection, replicas: int, index: int) -> int:
    """Return how many of a section's replicas belong to a router."""
    sharding = config.sharding()
    if isinstance(section, DrafterSection):
        return sharding.drafters(replicas, config.target.first_replicas)[index]
    return sharding.targets(replicas)[index] if isinstance(section, WorkerSection) else replicas


def _router_replicas(config: LeadoutConfig, index: int) -> dict[str, Any]:
    """One of each; where anything scales, it tells Serve's controller its load."""
    return {} if config.autoscaling_settings() is None else _autoscaled(config, ROUTER, (1, 1, 1), index)


def _autoscaled(config: LeadoutConfig, pool: str, bounds: tuple[int, int, int], index: int) -> dict[str, Any]:
    settings = config.autoscaling_settings()
    assert settings is not None
    policy = PoolOfRouter(pool, index, config.sharding())
    return {"autoscaling_config": serve_autoscaling(policy, bounds, settings, config.autoscaling.interval_s)}


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
