"""Reading a Serve config file: where to listen, and the `args` of the one application in it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from workers.errors import ConfigurationError

IMPORT_PATH = "deployments.app:build_app"


@dataclass(frozen=True, slots=True)
class ServeConfigFile:
    """What the file says. `arguments` are validated by `deployments.config.parse_config`."""

    host: str
    port: int
    route_prefix: str
    arguments: dict[str, Any]


def read_serve_config(path: Path) -> ServeConfigFile:
    """Read `path`. Raises ConfigurationError, one line, when it is not a Serve config with a Leadout application.

    Keys that only `serve run` and KubeRay honour are refused rather than ignored.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"config file {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"config file {path} is not YAML: {' '.join(str(error).split())}") from error
    applications = content.get("applications") if isinstance(content, dict) else None
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigurationError(f"config file {path}: applications must list exactly one application")
    application = applications[0]
    if application.get("import_path") != IMPORT_PATH:
        raise ConfigurationError(f"config file {path}: applications[0].import_path must be {IMPORT_PATH}")
    arguments = application.get("args")
    if not isinstance(arguments, dict):
        raise ConfigurationError(f"config file {path}: applications[0].args is missing")
    _refuse_unknown(path, content, {"applications", "http_options", "proxy_location"})
    _refuse_unknown(path, application, {"name", "route_prefix", "import_path", "args"}, "applications[0].")
    http = content.get("http_options") or {}
    _refuse_unknown(path, http, {"host", "port"}, "http_options.")
    return ServeConfigFile(
        host=str(http.get("host", "127.0.0.1")),
        port=_port(path, http.get("port", 8000)),
        route_prefix=str(application.get("route_prefix", "/")),
        arguments=arguments,
    )


def _port(path: Path, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 65536:
        raise ConfigurationError(f"config file {path}: http_options.port must be a port number, not {value!r}")
    return value


def _refuse_unknown(path: Path, section: dict[str, Any], known: set[str], prefix: str = "") -> None:
    for key in section:
        if key not in known:
            raise ConfigurationError(f"config file {path}: unknown key {prefix}{key}")
