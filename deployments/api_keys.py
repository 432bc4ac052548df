"""API keys at rest: only their SHA-256 digests are kept, in a file or an environment variable."""

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workers.errors import ConfigurationError

KEY_PREFIX = "lo-"
KEY_BYTES = 32
DIGEST = re.compile(r"[0-9a-fA-F]{64}")
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key that is let in: its name, and the SHA-256 digest (32 bytes) of its text."""

    name: str
    digest: bytes = field(repr=False)


def new_key() -> str:
    """Return a fresh random key. Its 256 bits make a plain hash safe: there is nothing to guess from."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest_of(key: str) -> bytes:
    """Return the SHA-256 digest of a key's text."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def key_line(key: str, name: str | None = None) -> str:
    """Return the line by which a file lets `key` in. ConfigurationError for an impossible name."""
    if name is not None and not NAME.fullmatch(name):
        raise ConfigurationError(f"the name {name!r} must be 1 to 64 of A-Z a-z 0-9 . _ -")
    digest = digest_of(key).hex()
    return digest if name is None else f"{name}:{digest}"


def matching_key(keys: Sequence[ApiKey], presented: str) -> ApiKey | None:
    """Return the key that `presented` is, or None. All are compared, each in constant time, whichever it is."""
    digest = digest_of(presented)
    found: ApiKey | None = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def read_keys(
    file: str | None, variable: str | None, environment: Mapping[str, str] = os.environ
) -> tuple[ApiKey, ...]:
    """Read the keys of `file` and of the environment variable `variable`; none if neither is configured.

    Raises ConfigurationError, which names the key of the configuration and the line, and never repeats the line: it may
    hold a key that somebody forgot to hash. Sources that are configured and hold no keys are an error, too.
    """
    keys: list[ApiKey] = []
    if file is not None:
        keys += _parse("ingress.api_keys_file", str(file), _file_text(file))
    if variable is not None:
        if variable not in environment:
            raise ConfigurationError(f"ingress.api_keys_env: the environment variable {variable} is not set")
        keys += _parse("ingress.api_keys_env", variable, environment[variable])
    for what, values in (("name", [key.name for key in keys]), ("digest", [key.digest.hex() for key in keys])):
        if repeated := next((value for value in values if values.count(value) > 1), None):
            raise ConfigurationError(f"ingress.api_keys_file, ingress.api_keys_env: the {what} {repeated} comes twice")
    return tuple(keys)


def _file_text(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"ingress.api_keys_file: {file} is not UTF-8 text") from error
    except OSError as error:
        raise ConfigurationError(f"ingress.api_keys_file: {file}: {error.strerror}") from error


def _parse(option: str, source: str, text: str) -> list[ApiKey]:
    keys = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        name, colon, digest = content.rpartition(":")
        if not DIGEST.fullmatch(digest) or (colon and not NAME.fullmatch(name)):
            raise ConfigurationError(
                f"{option}: {source}, line {number}: must be a SHA-256 digest of 64 hexadecimal digits, or name:digest"
            )
        # A digest's beginning names a key without telling anything of it.
        keys.append(ApiKey(name or digest[:8].lower(), bytes.fromhex(digest)))
    if not keys:
        raise ConfigurationError(f"{option}: {source} holds no keys")
    return keys
