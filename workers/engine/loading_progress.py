"""What a load shows while it runs: a bar on a terminal, and in the log a line when it begins and when it is done."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)


class LoadingReport:
    """Tells of one load, or keeps quiet if the rank that loads is not the first of its group."""

    def __init__(self, what: str, weights_bytes: int, rank: int) -> None:
        self._what = what
        self._speaks = rank == 0
        self._began_s = time.perf_counter()
        if self._speaks:
            logger.info("loading %s: %s of weights", what, _gib(weights_bytes))

    def done(self, model: torch.nn.Module) -> None:
        """Say what this process holds now."""
        if self._speaks:
            seconds = time.perf_counter() - self._began_s
            logger.info("loaded %s in %.1f s: %s of weights", self._what, seconds, _gib(held_bytes(model)))


def held_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a model's weights and buffers in this process; of a weight that is split, its own share."""
    tensors = {id(tensor): local_tensor(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the share of `tensor` that this process has: all of it, unless it is split over ranks."""
    to_local: Any = getattr(tensor, "to_local", None)
    local: torch.Tensor = tensor if to_local is None else to_local()
    return local


def can_draw_bar(rank: int) -> bool:
    """Whether a bar may be drawn: by the first rank only, on a terminal, and nowhere where another display is drawn."""
    # Rich puts a stream of its own in the place of the terminal while it shows something.
    return rank == 0 and sys.stderr is sys.__stderr__ and sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def quiet_transformers(bar: bool = False) -> Iterator[None]:
    """Silence the advice of transformers, whose place is not a server's log, and its progress bars but for `bar`."""
    from transformers.utils import logging as library

    library_logging: Any = library

    verbosity = library_logging.get_verbosity()
    hides_bar = library_logging.is_progress_bar_enabled() and not bar
    library_logging.set_verbosity_error()
    if hides_bar:
        library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(verbosity)
        if hides_bar:
            library_logging.enable_progress_bar()


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g} GiB"
