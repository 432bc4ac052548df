"""Where the log lines of a worker's process go."""

import logging

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def show_worker_log() -> None:
    """Let what workers log from level INFO on reach standard error, which Ray keeps in a file per process.

    Handlers that are there already stay as they are. Doing it twice is harmless.
    """
    logging.basicConfig(format=_FORMAT)
    logging.getLogger("workers").setLevel(logging.INFO)
