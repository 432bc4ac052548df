"""Client libraries against a running service: the examples of README.md and docs/api.md, unchanged but for the port.

`make bench BENCH=clients` installs the newest openai, langchain-openai and litellm into a temporary environment of
their own, serves the embedded pair and runs every example that names its address. `ARGS="--url URL"` asks a service
that runs already, `ARGS="--environment FOLDER"` uses an environment that has the libraries. Exits with 1 if one fails
or prints nothing.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import ROOT, Row, report, running_service, tiny_pair_config

LIBRARIES = ("openai", "langchain-openai", "litellm")
PAGES = ("README.md", "docs/api.md")
ADDRESS = "http://127.0.0.1:8000"
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.M | re.S)
TIMEOUT_S = 300.0
# Neither looks for news, sends usage or asks other hosts for price lists.
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "LITELLM_MODE": "PRODUCTION"}


@dataclass(frozen=True, slots=True)
class Example:
    """One block of code of a page."""

    page: str
    language: str
    code: str

    @property
    def name(self) -> str:
        """The page and the first library or command that the example names."""
        library = re.search(r"^(?:from|import) (\w+)|^(curl)", self.code, re.M)
        return f"{self.page}: {next(filter(None, library.groups())) if library else self.language}"

    def command(self, python: Path, url: str) -> list[str]:
        """Return what runs it against `url`."""
        code = self.code.replace(ADDRESS, url)
        return [str(python), "-c", code] if self.language == "python" else ["bash", "-euc", with_failures(code)]


def with_failures(code: str) -> str:
    """Let curl tell by its status that the service refused, which it does not by itself."""
    return re.sub(r"^curl ", "curl --fail-with-body --no-progress-meter ", code, flags=re.M)


def examples() -> list[Example]:
    """Return every example that asks the service something."""
    return [
        Example(page, language, code)
        for page in PAGES
        for language, code in BLOCK.findall((ROOT / page).read_text("utf-8"))
        if f"{ADDRESS}/" in code and not code.startswith("make")
    ]


@contextlib.contextmanager
def environment(folder: str | None) -> Iterator[Path]:
    """Give the Python of an environment with the libraries, made for as long as the block lasts if none is named."""
    if folder is not None:
        yield Path(folder) / "bin" / "python"
        return
    with tempfile.TemporaryDirectory() as made:
        subprocess.run([sys.executable, "-m", "venv", made], check=True)
        python = Path(made) / "bin" / "python"
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *LIBRARIES]
        subprocess.run(install, check=True)
        yield python


def run(example: Example, python: Path, url: str) -> tuple[float, str]:
    """Run an example; return how long it took, and what went wrong, or nothing."""
    began = time.perf_counter()
    done = subprocess.run(
        example.command(python, url),
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | QUIET,
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    took_s = time.perf_counter() - began
    if done.returncode:
        return took_s, done.stdout[-2_000:] + done.stderr[-2_000:]
    return took_s, "" if done.stdout.strip() else "it printed nothing"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same; it takes a minute or two")
    parser.add_argument("--url")
    parser.add_argument("--environment")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        python = stack.enter_context(environment(options.environment))
        url = options.url or stack.enter_context(running_service(tiny_pair_config())).url
        outcomes = {example.name: run(example, python, url) for example in examples()}
    failures = {name: wrong for name, (_, wrong) in outcomes.items() if wrong}
    report("clients", [Row(name, took_s, "s") for name, (took_s, _) in outcomes.items()])
    for name, wrong in failures.items():
        print(f"{name} failed:\n{wrong}")
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
