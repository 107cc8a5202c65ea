"""Call a function as soon as a module has been imported, and not before."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(module: str, then: Callable[[], None]) -> None:
    """Call `then` once `module` is imported: now, if it is already."""
    if module in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(module, then))


class _Finder(MetaPathFinder):
    """Finds one module, once, where the other finders do, with a loader that calls `then` afterwards."""

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self.module, self.then = module, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.then)
        return spec


class _Loader(Loader):
    def __init__(self, found: Loader, then: Callable[[], None]) -> None:
        self.found, self.then = found, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.found.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module is as if it had been found without us.
        module.__loader__ = self.found
        assert module.__spec__ is not None
        module.__spec__.loader = self.found
        self.found.exec_module(module)
        self.then()
