"""API keys at rest: what a line may be, and that no message or listing ever shows a key."""

import hashlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.api_keys import ApiKey, digest_of, key_line, matching_key, new_key, read_keys
from deployments.cli import cli
from deployments.config import parse_config
from workers.errors import ConfigurationError

A, B = hashlib.sha256(b"key-a").hexdigest(), hashlib.sha256(b"key-b").hexdigest()


def keys_file(folder: Path, content: str) -> str:
    path = folder / "keys"
    path.write_text(content)
    return str(path)


def test_a_file_holds_digests_names_comments_and_blank_lines(tmp_path: Path) -> None:
    file = keys_file(tmp_path, f"# our keys\n\n  ci:{A}  # the build\n{B.upper()}\r\n")
    assert read_keys(file, None) == (ApiKey("ci", bytes.fromhex(A)), ApiKey(B[:8], bytes.fromhex(B)))


def test_file_and_environment_add_up(tmp_path: Path) -> None:
    keys = read_keys(keys_file(tmp_path, f"one:{A}"), "KEYS", {"KEYS": f"two:{B}\n"})
    assert [key.name for key in keys] == ["one", "two"]


def test_without_either_there_are_no_keys() -> None:
    assert read_keys(None, None, {}) == ()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "ingress.api_keys_file: {file} holds no keys"),
        ("# only words\n", "holds no keys"),
        (f"{A}\nlo-forgotten-to-hash\n", "{file}, line 2: must be a SHA-256 digest"),
        (A[:-1], "line 1"),
        (f"a b:{A}", "line 1"),
        (f":{A}", "line 1"),
        (f"x:{A}\nx:{B}", "the name x comes twice"),
        (f"x:{A}\ny:{A}", f"the digest {A} comes twice"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_without_repeating_it(tmp_path: Path, content: str, named: str) -> None:
    file = keys_file(tmp_path, content)
    with pytest.raises(ConfigurationError) as refusal:
        read_keys(file, None)
    assert named.format(file=file) in str(refusal.value)
    assert "\n" not in str(refusal.value) and "forgotten" not in str(refusal.value)


def test_sources_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ingress\.api_keys_file: .*nowhere"):
        read_keys(str(tmp_path / "nowhere"), None)
    with pytest.raises(ConfigurationError, match=r"ingress\.api_keys_env: .* UNSET is not set"):
        read_keys(None, "UNSET", {})
    with pytest.raises(ConfigurationError, match=r"ingress\.api_keys_env: EMPTY holds no keys"):
        read_keys(None, "EMPTY", {"EMPTY": ""})


def test_only_the_very_key_matches() -> None:
    keys = (ApiKey("a", digest_of("key-a")), ApiKey("b", digest_of("key-b")))
    assert matching_key(keys, "key-a") == keys[0] and matching_key(keys, "key-b") == keys[1]
    for wrong in ("", "key-", "key-a ", "KEY-A", A, "a", "key-é"):
        assert matching_key(keys, wrong) is None
    assert matching_key((), "key-a") is None


def test_a_key_shows_neither_itself_nor_its_digest() -> None:
    shown = repr(ApiKey("ci", digest_of("key-a")))
    assert "ci" in shown and "key-a" not in shown and "digest" not in shown


def test_the_configuration_reads_its_keys_and_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORE_KEYS", B)
    ingress = {
        "api_keys_file": keys_file(tmp_path, f"ci:{A}"),
        "api_keys_env": "MORE_KEYS",
        "max_concurrent_per_key": 3,
        "body_timeout_s": 5.0,
    }
    rules = parse_config({"target": {"model": "m"}, "ingress": ingress}).ingress.access_rules()
    assert [key.name for key in rules.keys] == ["ci", B[:8]]
    assert (rules.max_concurrent_per_key, rules.body_timeout_s) == (3, 5.0)
    open_to_all = parse_config({"target": {"model": "m"}}).ingress.access_rules()
    assert (open_to_all.keys, open_to_all.max_concurrent_per_key, open_to_all.body_timeout_s) == ((), None, 30.0)


@pytest.mark.parametrize(
    ("key", "value"), [("max_concurrent_per_key", 0), ("body_timeout_s", 0), ("api_keys_file", ""), ("api_keys_env", 1)]
)
def test_impossible_limits_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"ingress\.{key}"):
        parse_config({"target": {"model": "m"}, "ingress": {key: value}})


def test_hash_key_prints_a_fresh_key_and_the_line_that_lets_it_in() -> None:
    first, second = (CliRunner().invoke(cli, ["hash-key", "--name", "ci"]) for _ in range(2))
    assert first.exit_code == 0, first.output
    key, line = (part.split(": ", 1)[1].strip() for part in first.stdout.splitlines())
    assert line == f"ci:{hashlib.sha256(key.encode()).hexdigest()}" and len(key) > 40
    assert matching_key(read_keys(None, "K", {"K": line}), key) is not None
    assert first.stdout != second.stdout


def test_hash_key_hashes_a_key_that_is_there_already() -> None:
    result = CliRunner().invoke(cli, ["hash-key", "--stdin"], input="key-a\n")
    assert (result.exit_code, result.stdout) == (0, f"{A}\n")
    refused = CliRunner().invoke(cli, ["hash-key", "--name", "a b"])
    assert refused.exit_code == 2 and "a b" in refused.stderr
    assert CliRunner().invoke(cli, ["hash-key", "--stdin"], input="\n").exit_code == 2


def test_new_keys_differ_and_lines_may_go_without_a_name() -> None:
    assert len({new_key() for _ in range(50)}) == 50
    assert key_line("key-a") == A
