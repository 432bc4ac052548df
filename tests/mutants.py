"""Broken versions of the product: a module's source with one change, in place of the module while a test runs."""

import inspect
import sys
from dataclasses import dataclass
from types import FunctionType, ModuleType

import pytest


@dataclass(frozen=True)
class Mutant:
    """Replaces `right`, which stands in the source of `module` exactly once, by `wrong`."""

    module: ModuleType
    right: str
    wrong: str

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let everybody who uses a function of the module use that of the broken one, until the test ends."""
        source = inspect.getsource(self.module)
        assert source.count(self.right) == 1, f"{self.module.__name__} has changed: {self.right!r}"
        broken = ModuleType(self.module.__name__)
        exec(compile(source.replace(self.right, self.wrong), self.module.__file__ or "", "exec"), broken.__dict__)
        for owner in (self.module, *(value for value in vars(self.module).values() if isinstance(value, type))):
            replacement = broken if owner is self.module else getattr(broken, owner.__name__, None)
            for name, function in list(vars(owner).items()):
                if isinstance(function, FunctionType) and function.__module__ == self.module.__name__:
                    _replace(function, owner, vars(replacement)[name], monkeypatch)


def _replace(right: FunctionType, owner: object, wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put `wrong` wherever the function `right` is known: in its class or, if it has none, in all modules."""
    importers = [module for name, module in list(sys.modules.items()) if name.startswith(("workers.", "tests."))]
    for holder in [owner] if isinstance(owner, type) else importers:
        for name in [name for name, value in vars(holder).items() if value is right]:
            monkeypatch.setattr(holder, name, wrong)
