"""Find hooks by name. To add a hook, add its module to `MODULES`, or call `register_compressor`."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from commhooks.compressors.base import Compressor
from commhooks.compressors.state_field import StateField
from commhooks.errors import HookConfigError
from commhooks.options import HookConfig

MODULES = (
    "commhooks.compressors.cast",
    "commhooks.compressors.quantized.options",
    "commhooks.compressors.powersgd.options",
    "commhooks.local_steps.options",
    "commhooks.auto.options",
)
"""The modules with the options of the built-in hooks. Each has a dict `COMPRESSOR_PATHS`:
options class -> "module:class" of the compressor. Nothing else names them, so that a feature can
be taken out.
"""


@dataclass(frozen=True)
class BuiltIn:
    """A hook of commhooks, whose compressor is imported when it is used.

    Attributes:
        Config: the options.
        path: "module:class" of the compressor.
    """

    Config: type[HookConfig]
    path: str

    def load(self) -> type[Compressor[Any]]:
        module, _, name = self.path.partition(":")
        compressor: type[Compressor[Any]] = getattr(importlib.import_module(module), name)
        return compressor


def built_in_hooks() -> dict[str, BuiltIn | type[Compressor[Any]]]:
    """Return the built-in hooks by name; this imports their options."""
    return {
        config.hook_name: BuiltIn(config, path)
        for module in MODULES
        for config, path in importlib.import_module(module).COMPRESSOR_PATHS.items()
    }


COMPRESSORS = built_in_hooks()
"""Built-in hooks and registered compressor classes by hook name. `register_compressor` adds to this
dict.
"""
Factory = Callable[[dict[str, Any], dist.ProcessGroup | None], tuple[Any, Callable[..., Any]]]
FACTORIES: dict[str, Factory] = {}
"""Factories of users' hooks by name. `register_hook` adds to this dict."""

OFF = "none"
"""The name for training without a hook."""

CompressorClass = TypeVar("CompressorClass", bound=type[Compressor[Any]])


def register_compressor(compressor: CompressorClass) -> CompressorClass:
    """Register a compressor class as a hook, for all front ends, checkpoints, plans and statistics.
    Can be used as a class decorator.

    Every process that uses the hook must import the module that calls this. Alternatively pass the
    path `"package.module:Class"` as `hook`, which imports the module and registers the class.
    Registering the same class again, for example from a reloaded module, replaces the earlier one.

    Args:
        compressor: a subclass of `commhooks.Compressor`. Its `Config` is a frozen keyword-only
            dataclass derived from `commhooks.HookConfig`, with a `hook_name`.

    Raises:
        HookConfigError: `compressor` is not such a class, or its name is taken.
    """
    if not (isinstance(compressor, type) and issubclass(compressor, Compressor)):
        raise HookConfigError(
            f"register_compressor({compressor!r}): expected a subclass of commhooks.Compressor"
        )
    problem = _problem(compressor)
    if problem is not None:
        raise HookConfigError(f"register_compressor({compressor.__name__}): {problem}")
    config = compressor.Config
    _check_word("register_compressor", config.hook_name)
    before = COMPRESSORS.get(config.hook_name)
    reloaded = before is not None and _path_of(before) == _path_of(compressor)
    again = before is compressor or (reloaded and "<locals>" not in compressor.__qualname__)
    for name in (config.hook_name, *config.aliases):
        if not again or canonical_name(name) != config.hook_name:
            _check_free("register_compressor", name)
    COMPRESSORS[config.hook_name] = compressor
    return compressor


def register_hook(name: str, factory: Factory) -> None:
    """Register a function as a hook by name, for all front ends. Plans, statistics and checkpoints
    of learned state need a compressor: see `register_compressor`.

    Args:
        factory: `factory(options: dict, process_group) -> (state, hook)`. `attach` calls it on
            every rank. `hook` has the signature `(state, bucket) ->
            torch.futures.Future[torch.Tensor]`. `state` is saved and restored if it has
            `state_dict` and `load_state_dict` (plain types and tensors).

    Raises:
        HookConfigError: the name is taken or invalid, or the factory is not callable.
    """
    _check_word("register_hook", name)
    if not callable(factory):
        raise HookConfigError(
            f"register_hook({name!r}): the factory is a {type(factory).__name__}, not callable"
        )
    _check_free("register_hook", name)
    FACTORIES[name] = factory


def available_hooks() -> dict[str, dict[str, Any]]:
    """Return {name: {"description": one line, "options": {option: default}}} for all registered
    hooks.
    """
    hooks: dict[str, dict[str, Any]] = {}
    for name, hook in COMPRESSORS.items():
        hooks[name] = {
            "description": ((hook.Config.__doc__ or "").strip().splitlines() or [""])[0],
            "options": dataclasses.asdict(hook.Config()),
        }
    for name, factory in FACTORIES.items():
        lines = (factory.__doc__ or "registered by register_hook").strip().splitlines()
        hooks[name] = {"description": lines[0], "options": {}}
    return hooks


def _problem(compressor: type[Compressor[Any]]) -> str | None:
    config = getattr(compressor, "Config", None)
    if not (isinstance(config, type) and issubclass(config, HookConfig)):
        return f"its Config is {config!r}; expected a dataclass derived from commhooks.HookConfig"
    if "__dataclass_fields__" not in vars(config):
        return (
            f"{config.__name__} is not a dataclass: decorate it with @dataclass(frozen=True,"
            " kw_only=True)"
        )
    if not isinstance(getattr(config, "hook_name", None), str):
        return f"{config.__name__} has no hook_name, the name by which the hook is known"
    missing = sorted(getattr(compressor, "__abstractmethods__", ()))
    if missing:
        return f"it does not define {', '.join(missing)}"
    if not isinstance(config.aliases, tuple):
        return f"{config.__name__}.aliases is {config.aliases!r}; expected a tuple of names"
    fields = compressor.state_fields  # a property where they depend on the options
    if not isinstance(fields, (Sequence, property)) or isinstance(fields, str):
        return f"its state_fields are {fields!r}; expected a tuple, such as (commhooks.RESIDUAL,)"
    for state_field in () if isinstance(fields, property) else fields:
        if not isinstance(state_field, StateField):
            return (
                f"its state_fields hold {state_field!r}; expected commhooks.RESIDUAL or"
                " StateField('name')"
            )
    names = [option.name for option in dataclasses.fields(config)]
    if config.start_option is not None and config.start_option not in names:
        return f"start_option={config.start_option!r} is not one of the options {names}"
    ignored = [config.start_option or "", "exclude"]
    if not compressor.transactional and (compressor.state_fields or set(ignored) & set(names)):
        return (
            "with transactional=False there is no learned state and no start step: remove"
            " state_fields, start, exclude"
        )
    try:
        config()
    except TypeError as error:
        return f"{config.__name__}() failed ({error}): every option needs a default"
    return None


def _check_word(caller: str, name: object) -> None:
    if isinstance(name, str) and means_no_hook(name):
        raise HookConfigError(
            f"{caller}: name={name!r} means training without a hook; choose another name"
        )
    if (
        not isinstance(name, str)
        or not name
        or ":" in name
        or any(letter.isspace() for letter in name)
    ):
        raise HookConfigError(f"{caller}: name={name!r}; expected a word without ':' and spaces")


def _check_free(caller: str, name: str) -> None:
    if (hook := canonical_name(name)) is not None:
        raise HookConfigError(f"{caller}: the name {name!r} is taken by {hook!r}")


def canonical_name(name: str) -> str | None:
    """Return the registered hook that `name` stands for (a name or an alias), or None. Ignores
    case, `_` and `-`.
    """

    def plain(text: str) -> str:
        return text.lower().replace("_", "").replace("-", "")

    names = {plain(hook): hook for hook in (*COMPRESSORS, *FACTORIES)}
    names |= {plain(alias): hook for alias, hook in aliases().items()}
    return names.get(plain(name))


def means_no_hook(hook: object) -> bool:
    """Return whether `hook` requests training without a hook: None, "none", "off", or False (YAML
    reads `off` as False).
    """
    return hook is None or hook is False or (isinstance(hook, str) and hook.lower() in (OFF, "off"))


def aliases() -> dict[str, str]:
    return {alias: name for name, hook in COMPRESSORS.items() for alias in hook.Config.aliases}


def _path_of(hook: BuiltIn | type[Compressor[Any]]) -> str:
    return hook.path if isinstance(hook, BuiltIn) else f"{hook.__module__}:{hook.__qualname__}"


def compressor_named(name: str) -> type[Compressor[Any]] | None:
    """Return the compressor class of the hook with this name, not an alias; None if there is none.
    For a built-in hook this imports it.
    """
    hook = COMPRESSORS.get(name)
    return hook.load() if isinstance(hook, BuiltIn) else hook


def compressor_of(config: HookConfig) -> type[Compressor[Any]]:
    """Return the compressor class of a config; for a built-in hook this imports it."""
    compressor = compressor_named(config.hook_name)
    if compressor is None or not isinstance(config, compressor.Config):
        raise HookConfigError(
            f"{type(config).__module__}.{type(config).__name__} is the config of a compressor that"
            " is not registered in this process: import the module that calls"
            " commhooks.register_compressor, on every rank"
        )
    return compressor


def names_to_offer() -> list[str]:
    return [*(name for name, hook in COMPRESSORS.items() if hook.Config.sends), *FACTORIES]
