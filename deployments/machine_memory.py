"""Whether one machine can hold a whole deployment, from configurations alone: nothing is loaded, no process started."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from deployments.config import LeadoutConfig, WorkerSection
from workers.engine.config import EngineConfig
from workers.engine.loading import memory_need, resolve_device, shares_weights
from workers.engine.memory import MemoryNeed, total_bytes
from workers.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class _Workers:
    """The processes of one section of the configuration, each with a `need` of its own."""

    key: str
    engine: EngineConfig
    device: torch.device
    processes: int
    need: MemoryNeed

    @property
    def pools(self) -> int:
        return self.processes * self.need.pool

    @property
    def weights(self) -> int:
        """Weights of all processes. Replicas on the CPU share what is mapped; the ranks of one target share it out."""
        copies = self.engine.tensor_parallel_size if self._shared else self.processes
        return copies * self.need.weights

    @property
    def weights_key(self) -> object:
        """Equal where weights are shared."""
        return (self.engine.model, self.engine.dtype) if self._shared else self.key

    @property
    def _shared(self) -> bool:
        return shares_weights(self.engine, self.device)


def check_machine_memory(config: LeadoutConfig) -> None:
    """Check that this machine can hold all workers of `config`: weights and KV pools, not what steps need besides.

    Counted is the least that can be: a deployment that passes may still be refused when it loads. What a device has is
    taken as `total_bytes` says. Raises ConfigurationError, one line with keys, bytes needed and bytes available.
    """
    workers = list(_workers(config))
    for kind in sorted({each.device.type for each in workers}):
        here = [each for each in workers if each.device.type == kind]
        capacities = _capacities(kind)
        if capacities:
            _check_each(here, max(capacities))
            _check_all(here, sum(capacities), kind)


def _workers(config: LeadoutConfig) -> Iterator[_Workers]:
    target = config.target
    size = target.tensor_parallel_size
    yield _of("target", target, target.engine_config(size), size * target.most_replicas)
    for index, drafter in enumerate(config.drafters):
        if drafter.most_replicas > 0:
            yield _of(f"drafters[{index}]", drafter, drafter.engine_config(), drafter.most_replicas)


def _of(key: str, section: WorkerSection, engine: EngineConfig, processes: int) -> _Workers:
    try:
        device = resolve_device(engine.device)
    except ConfigurationError as error:
        raise ConfigurationError(f"{key}.device: {error}") from error
    # Which form "auto" will take is not known yet; it may be the smallest.
    least = replace(engine, quantization="nf4") if section.quantization == "auto" else engine
    return _Workers(key, least, device, processes, memory_need(least, device))


def _capacities(kind: str) -> list[int]:
    """Return the memory of each device of this kind; nothing where it is not known."""
    devices = [torch.device(kind, index) for index in range(torch.cuda.device_count())] if kind == "cuda" else None
    known = [total_bytes(device) for device in devices or [torch.device(kind)]]
    return [count for count in known if count is not None]


def _check_each(workers: Sequence[_Workers], capacity: int) -> None:
    for each in workers:
        if each.need.total > capacity:
            raise ConfigurationError(
                f"{each.key}.kv_cache_gib: one process of {each.engine.model} needs {_gib(each.need.total)} "
                f"({_gib(each.need.weights)} of weights, {_gib(each.need.pool)} of KV pool), and "
                f"{_gib(capacity)} are available on {each.device}"
            )


def _check_all(workers: Sequence[_Workers], capacity: int, kind: str) -> None:
    weights: dict[object, int] = {}
    for each in workers:
        weights[each.weights_key] = max(each.weights, weights.get(each.weights_key, 0))
    needed = sum(weights.values()) + sum(each.pools for each in workers)
    if needed > capacity:
        parts = ", ".join(
            f"{each.key}.kv_cache_gib {each.engine.kv_cache_gib:g} in {each.processes} process(es)" for each in workers
        )
        raise ConfigurationError(
            f"all workers on {kind} need {_gib(needed)} ({_gib(sum(weights.values()))} of weights; {parts}), and "
            f"{_gib(capacity)} are available"
        )


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"
