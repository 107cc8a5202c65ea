"""The registry of compressors by name. To add a hook, write one module and add its class to `BUILT_IN`, or call
`register_compressor`."""

from collections.abc import Callable
from typing import Any, TypeVar

from commhooks.compressors.base import Compressor
from commhooks.compressors.cast import AllReduceCompressor, BF16Compressor, FP16Compressor
from commhooks.compressors.config import HookConfig
from commhooks.compressors.noop import NoopCompressor
from commhooks.compressors.powersgd.compressor import BatchedPowerSGDCompressor, PowerSGDCompressor
from commhooks.errors import HookConfigError

BUILT_IN: tuple[type[Compressor[Any]], ...] = (
    AllReduceCompressor,
    FP16Compressor,
    BF16Compressor,
    PowerSGDCompressor,
    BatchedPowerSGDCompressor,
    NoopCompressor,
)
COMPRESSORS: dict[str, type[Compressor[Any]]] = {each.Config.hook_name: each for each in BUILT_IN}
"""Compressors by name. Global state: `register_compressor` adds to this table, `register_hook` to `FACTORIES`."""
FACTORIES: dict[str, Callable[..., Any]] = {}
"""Factories of users' own hooks by name; see `commhooks.register_hook`."""

CompressorClass = TypeVar("CompressorClass", bound=type[Compressor[Any]])


def register_compressor(compressor: CompressorClass) -> CompressorClass:
    """Register a compressor class as a hook. It then works as the built-in ones do: by name or by config class, in
    Python, YAML and on the command line, in checkpoints, plans, statistics and the doctor. Usable as a class decorator.

    Every process that uses the hook must import the module that calls this. Alternatively pass the path
    `"package.module:Class"` as `hook`, which imports the module and registers the class. Registering the same class
    again, or the same class of a reloaded module, replaces it.

    Args:
        compressor: a subclass of `commhooks.Compressor` with a `Config`, a frozen keyword-only dataclass derived from
            `commhooks.HookConfig` that has a `hook_name`.

    Raises:
        HookConfigError: `compressor` is not such a class, or its name is taken.
    """
    if not (isinstance(compressor, type) and issubclass(compressor, Compressor)):
        raise HookConfigError(f"register_compressor({compressor!r}): expected a subclass of commhooks.Compressor")
    config = getattr(compressor, "Config", None)
    if not (isinstance(config, type) and issubclass(config, HookConfig)):
        raise HookConfigError(
            f"register_compressor({compressor.__name__}): its Config is {config!r}; expected a dataclass derived from "
            "commhooks.HookConfig"
        )
    name = getattr(config, "hook_name", None)
    check_name("register_compressor", name)
    assert isinstance(name, str)
    known = COMPRESSORS.get(name)
    same = known is not None and (known.__module__, known.__qualname__) == (
        compressor.__module__,
        compressor.__qualname__,
    )
    if not same:
        for each in (name, *config.aliases):
            check_free("register_compressor", each)
    try:
        config()
    except TypeError as error:
        raise HookConfigError(
            f"register_compressor({compressor.__name__}): {config.__name__}() failed ({error}): every option needs a "
            "default"
        ) from error
    COMPRESSORS[name] = compressor
    return compressor


def check_name(caller: str, name: object) -> None:
    """Raise HookConfigError unless `name` is a valid hook name: a non-empty string without ":" and whitespace."""
    if not isinstance(name, str) or not name or ":" in name or any(letter.isspace() for letter in name):
        raise HookConfigError(f"{caller}: name={name!r}; expected a word without ':' and spaces")


def check_free(caller: str, name: str) -> None:
    """Raise HookConfigError if a hook of that name is registered."""
    if canonical_name(name) is not None:
        raise HookConfigError(f"{caller}: the name {name!r} is taken by {canonical_name(name)!r}")


def canonical_name(name: str) -> str | None:
    """The registered name that `name` (a name or an alias) refers to, or None. Case, `_` and `-` are ignored."""

    def plain(text: str) -> str:
        return text.lower().replace("_", "").replace("-", "")

    names = {plain(known): known for known in (*COMPRESSORS, *FACTORIES)}
    names |= {plain(alias): known for alias, known in aliases().items()}
    return names.get(plain(name))


def aliases() -> dict[str, str]:
    """Alias -> registered name."""
    return {alias: name for name, each in COMPRESSORS.items() for alias in each.Config.aliases}


def compressor_of(config: HookConfig) -> type[Compressor[Any]]:
    """The compressor class that `config` configures.

    Raises:
        HookConfigError: that compressor is not registered.
    """
    found = COMPRESSORS.get(config.hook_name)
    if found is None or not isinstance(config, found.Config):
        raise HookConfigError(
            f"{type(config).__name__} is the config of a compressor that is not registered: call "
            "commhooks.register_compressor with its class"
        )
    return found


def hook_names() -> list[str]:
    """All registered hook names, without aliases."""
    return [*COMPRESSORS, *FACTORIES]
