"""Tensor parallelism: several processes run the same packed steps, each on its share of the heads.

Rank 0 owns the block accounting and broadcasts every step; the other ranks follow. Control messages go over their
own gloo group on the CPU, whatever device computes, so they never queue behind the model's collectives.
"""

import importlib.util
import logging
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Protocol

import torch
import torch.distributed as dist

from workers.engine.loading import attention_shape, load_config
from workers.engine.step import Int32Array, KVMoves, PackedStep
from workers.errors import ConfigurationError, LinkClosedError

logger = logging.getLogger(__name__)

_HEARTBEATS_PER_TIMEOUT = 4


@dataclass(frozen=True, slots=True)
class TensorParallelRank:
    """One process's place in a tensor-parallel group.

    Rank 0 listens on `master_address`:`master_port` while the group forms. A peer that is silent for `timeout_s`
    seconds counts as dead; ranks also wait for each other that long while they load.
    """

    rank: int
    world_size: int
    master_address: str
    master_port: int
    timeout_s: float


class _Message(IntEnum):
    STOP = 0
    STEP = 1
    HEARTBEAT = 2
    MOVES = 3


class StepRunner(Protocol):
    """What a follower drives: an engine that runs packed steps, moves KV entries and knows its group."""

    @property
    def group(self) -> "RankGroup | None":
        """The group this engine belongs to."""
        ...

    def execute(self, step: PackedStep) -> torch.Tensor:
        """Run one forward pass on this rank's share."""
        ...

    def move(self, moves: KVMoves) -> None:
        """Copy entries of this rank's KV pool."""
        ...


def check_tensor_parallel(model: str, size: int, trust_remote_code: bool = False) -> None:
    """Check that `model` can be split over `size` ranks, reading its configuration only.

    Raises ConfigurationError when the heads do not divide, the model has no sharding plan, or accelerate is
    not installed.
    """
    if size < 1:
        raise ConfigurationError(f"tensor_parallel_size is {size}; it must be at least 1")
    if size == 1:
        return
    config = load_config(model, trust_remote_code)
    heads, kv_heads, _ = attention_shape(config)
    for count, name in ((heads, "attention heads"), (kv_heads, "KV heads")):
        if count % size:
            raise ConfigurationError(f"tensor_parallel_size {size} does not divide the {count} {name} of model {model}")
    if not getattr(config, "base_model_tp_plan", None):
        raise ConfigurationError(
            f"tensor_parallel_size is {size}, and transformers has no plan to split model {model} ({config.model_type})"
        )
    # transformers places shards through it, and says so only after the group has formed.
    if importlib.util.find_spec("accelerate") is None:
        raise ConfigurationError(f"tensor_parallel_size is {size}, which needs the package accelerate; install it")


class RankGroup:
    """This process's membership in a tensor-parallel group, after `join`.

    Rank 0 sends, the others receive. Once the group is open and while rank 0 has nothing to send, a daemon thread
    sends heartbeats, so that followers can bound their wait.
    """

    def __init__(self, rank: TensorParallelRank) -> None:
        self.rank = rank
        self.lock = threading.RLock()  # held by rank 0 from the broadcast of a step to the end of its forward pass
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=rank.timeout_s))
        self._stopped = threading.Event()
        self._opened = False
        self._sent = False

    def open(self) -> None:
        """Begin the heartbeats, on rank 0. Called when all ranks have loaded, so that followers are about to listen."""
        self._opened = True
        if self.rank.rank == 0:
            threading.Thread(target=self._beat, name="tensor-parallel-heartbeat", daemon=True).start()

    def send_step(self, step: PackedStep) -> None:
        """Broadcast a step from rank 0. Raises LinkClosedError when a follower is gone."""
        self._send(_Message.STEP, step.to_array())

    def send_moves(self, moves: KVMoves) -> None:
        """Broadcast copies of KV entries from rank 0. Raises LinkClosedError when a follower is gone."""
        self._send(_Message.MOVES, moves.to_array())

    def receive(self) -> PackedStep | KVMoves | None:
        """Wait for what rank 0 does next; None means stop.

        Raises LinkClosedError when rank 0 is gone or silent for `timeout_s`.
        """
        header = torch.empty(2, dtype=torch.int32)
        try:
            while True:
                dist.broadcast(header, src=0, group=self._control)
                kind, size = header.tolist()
                if kind == _Message.STOP:
                    return None
                if kind in (_Message.STEP, _Message.MOVES):
                    payload = torch.empty(size, dtype=torch.int32)
                    dist.broadcast(payload, src=0, group=self._control)
                    return (PackedStep if kind == _Message.STEP else KVMoves).from_array(payload.numpy())
        except RuntimeError as error:
            raise group_broken(error) from error

    def close(self) -> None:
        """Leave the group; rank 0 tells the followers to stop first. Doing it twice is harmless."""
        with self.lock:
            if self._stopped.is_set():
                return
            if self._opened and self.rank.rank == 0:
                try:
                    self._send(_Message.STOP)
                except LinkClosedError as error:
                    logger.debug("followers were gone already: %s", error)
            self._stopped.set()
        dist.destroy_process_group()

    def _send(self, message: _Message, payload: Int32Array | None = None) -> None:
        size = 0 if payload is None else len(payload)
        with self.lock:
            if self._stopped.is_set():
                raise LinkClosedError("the tensor-parallel group is closed")
            try:
                dist.broadcast(torch.tensor([message, size], dtype=torch.int32), src=0, group=self._control)
                if payload is not None:
                    dist.broadcast(torch.from_numpy(payload), src=0, group=self._control)
            except RuntimeError as error:
                raise group_broken(error) from error
            self._sent = True

    def _beat(self) -> None:
        while not self._stopped.wait(self.rank.timeout_s / _HEARTBEATS_PER_TIMEOUT):
            with self.lock:
                if not self._sent and not self._stopped.is_set():
                    try:
                        self._send(_Message.HEARTBEAT)
                    except LinkClosedError as error:
                        logger.warning("%s", error)
                        return
                self._sent = False


def join(rank: TensorParallelRank, device: torch.device) -> RankGroup:
    """Form the process group, with all other ranks, and return this process's membership.

    Sets the environment variables that transformers reads. Raises ConfigurationError when the ranks do not all
    arrive in time, or when `device` is not the one that transformers would shard onto.
    """
    accelerator = torch.accelerator.current_accelerator()
    expected = "cpu" if accelerator is None or not torch.accelerator.is_available() else accelerator.type
    if device.type != expected:
        raise ConfigurationError(
            f"device {device} was asked for; tensor parallelism on this machine runs on {expected}"
        )
    local_rank = rank.rank % torch.cuda.device_count() if device.type == "cuda" else rank.rank
    os.environ.update(
        RANK=str(rank.rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(rank.world_size),
        MASTER_ADDR=rank.master_address,
        MASTER_PORT=str(rank.master_port),
    )
    if device.type == "cuda":
        torch.cuda.set_device(local_rank)
    try:
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{rank.master_address}:{rank.master_port}",
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timedelta(seconds=rank.timeout_s),
        )
        return RankGroup(rank)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(
            f"rank {rank.rank} of {rank.world_size} could not join {rank.master_address}:{rank.master_port}: {reason}"
        ) from error


def group_broken(error: Exception) -> LinkClosedError:
    """Return the error that tells the owner that a collective failed."""
    return LinkClosedError(f"the tensor-parallel group is broken: {(str(error).splitlines() or [''])[0]}")


def follow(engine: StepRunner) -> None:
    """Run rank 0's steps on a follower until rank 0 stops the group.

    Raises LinkClosedError when a peer dies, or when a step fails here: the group cannot go on then.
    """
    group = engine.group
    if group is None or group.rank.rank == 0:
        raise ValueError("only ranks above 0 of a tensor-parallel group follow")
    while (work := group.receive()) is not None:
        try:
            if isinstance(work, KVMoves):
                engine.move(work)
            else:
                engine.execute(work)
        except RuntimeError as error:
            raise group_broken(error) from error
