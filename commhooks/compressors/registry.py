"""The compressors by name. A new hook is one module and one line in `BUILT_IN`, or a call of `register_compressor`."""

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
"""By name. This table and `FACTORIES` outlive a call: the two functions that register are there to fill them."""
FACTORIES: dict[str, Callable[..., Any]] = {}
"""Factories of users' own hooks by name; see `commhooks.register_hook`."""

CompressorClass = TypeVar("CompressorClass", bound=type[Compressor[Any]])


def register_compressor(compressor: CompressorClass) -> CompressorClass:
    """Make a compressor of your own a hook like the built-in ones: by its name and its config class, in Python, YAML
    and on the command line, saved, resumed, planned, counted and measured. Usable as a decorator of the class.

    Every process that uses it must import the module that calls this. A path `"package.module:Class"` given as `hook`
    imports and registers by itself. Registering the same class again, or the class of a module that was loaded anew,
    replaces it.

    Args:
        compressor: a subclass of `commhooks.Compressor` with a `Config`, a frozen keyword-only dataclass derived from
            `commhooks.HookConfig` that has a `hook_name`.

    Raises:
        HookConfigError: it is no such class, or the name is taken.
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
    """Raise HookConfigError unless `name` can be the name of a hook."""
    if not isinstance(name, str) or not name or ":" in name or any(letter.isspace() for letter in name):
        raise HookConfigError(f"{caller}: name={name!r}; expected a word without ':' and spaces")


def check_free(caller: str, name: str) -> None:
    """Raise HookConfigError if a hook is known by that name."""
    if canonical_name(name) is not None:
        raise HookConfigError(f"{caller}: the name {name!r} is taken by {canonical_name(name)!r}")


def canonical_name(name: str) -> str | None:
    """The name under which a hook is known, or None. Case, `_` and `-` do not matter."""

    def plain(text: str) -> str:
        return text.lower().replace("_", "").replace("-", "")

    names = {plain(known): known for known in (*COMPRESSORS, *FACTORIES)}
    names |= {plain(alias): known for alias, known in aliases().items()}
    return names.get(plain(name))


def aliases() -> dict[str, str]:
    """Short name -> name."""
    return {alias: name for name, each in COMPRESSORS.items() for alias in each.Config.aliases}


def compressor_of(config: HookConfig) -> type[Compressor[Any]]:
    """The compressor whose options `config` holds.

    Raises:
        HookConfigError: nobody has registered one.
    """
    found = COMPRESSORS.get(config.hook_name)
    if found is None or not isinstance(config, found.Config):
        raise HookConfigError(
            f"{type(config).__name__} is the config of a compressor that is not registered: call "
            "commhooks.register_compressor with its class"
        )
    return found


def hook_names() -> list[str]:
    """Every name by which a hook can be had, aliases left out."""
    return [*COMPRESSORS, *FACTORIES]
