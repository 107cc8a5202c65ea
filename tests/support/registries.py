"""Remove the hooks and compressors that a test registers."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def registries_as_before() -> Iterator[None]:
    """Context manager: forget what the body registers, and the example module that registers it."""
    module = sys.modules.get("commhooks.registry")
    before = None if module is None else (dict(module.COMPRESSORS), dict(module.FACTORIES))
    try:
        yield
    finally:
        module = sys.modules.get("commhooks.registry")
        if module is not None:
            compressors, factories = before or (module.built_in_hooks(), {})
            for name, compressor in module.COMPRESSORS.items():
                if name not in compressors and compressor.__module__.startswith("examples."):
                    sys.modules.pop(compressor.__module__, None)
            for table, content in (
                (module.COMPRESSORS, compressors),
                (module.FACTORIES, factories),
            ):
                table.clear()
                table.update(content)
