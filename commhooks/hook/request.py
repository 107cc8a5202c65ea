"""A user's request for a hook, checked at once: no model and no process group are needed."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from commhooks.checkpoint.payload import SAVE_RESIDUAL
from commhooks.comm.nodes import RanksPerNode
from commhooks.comm.wire import WIRE_DTYPES, WRAPPERS
from commhooks.compressors.base import Compressor
from commhooks.compressors.cast import AllReduce
from commhooks.compressors.config import HookConfig, from_options
from commhooks.compressors.dotted_path import import_path
from commhooks.compressors.plain_values import plain
from commhooks.compressors.registry import (
    COMPRESSORS,
    FACTORIES,
    OFF,
    aliases,
    canonical_name,
    check_free,
    check_name,
    compressor_of,
    hook_names,
    means_no_hook,
    names_to_offer,
    register_compressor,
)
from commhooks.ddp_comm_hooks.drop_ins import DROP_INS
from commhooks.errors import HookConfigError, closest

Factory = Callable[[dict[str, Any], dist.ProcessGroup | None], tuple[Any, Callable[..., Any]]]


def register_hook(name: str, factory: Factory) -> None:
    """Register a user's hook by name, for Python, YAML and the command line.

    If plans, statistics and checkpoints should cover the hook as they do the built-in ones, write a compressor and use
    `register_compressor` instead.

    Args:
        name: the name of the hook; must not be taken.
        factory: `factory(options: dict, process_group) -> (state, hook)`, called on every rank when the hook is
            attached. `hook` has the signature `(state, bucket) -> torch.futures.Future[torch.Tensor]`. `state` is saved
            and restored if it has `state_dict` and `load_state_dict` (plain types and tensors).

    Raises:
        HookConfigError: the name is taken or invalid, or the factory is not callable.
    """
    check_name("register_hook", name)
    if not callable(factory):
        raise HookConfigError(f"register_hook({name!r}): the factory is a {type(factory).__name__}, not callable")
    check_free("register_hook", name)
    FACTORIES[name] = factory


def available_hooks() -> dict[str, dict[str, Any]]:
    """Name -> {"description": one line, "options": {option: default}} of every registered hook."""
    hooks: dict[str, dict[str, Any]] = {}
    for name, compressor in COMPRESSORS.items():
        hooks[name] = {
            "description": ((compressor.Config.__doc__ or "").strip().splitlines() or [""])[0],
            "options": dataclasses.asdict(compressor.Config()),
        }
    for name, factory in FACTORIES.items():
        lines = (factory.__doc__ or "registered by register_hook").strip().splitlines()
        hooks[name] = {"description": lines[0], "options": {}}
    return hooks


@dataclass(frozen=True)
class HookRequest:
    """A checked request for a hook. Picklable if its contents are.

    Exactly one of `config`, `factory` and `function` is set, and none of them where `off`.
    """

    name: str
    config: HookConfig | None = None
    factory: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    hook_state: Any = None
    wrapper: str | None = None
    save_residual: str = "per_rank"
    strict: bool = True
    check_every: int | None = None
    ranks_per_node: RanksPerNode = None
    distributed: bool = False
    """`state_dict()` has the form for `torch.distributed.checkpoint`. Always so for sharded models."""
    ignored: tuple[str, ...] = ()
    """The given arguments that are of no use without a hook."""

    @classmethod
    def parse(
        cls,
        hook: HookConfig | Callable[..., Any] | str | None,
        *,
        hook_options: Mapping[str, Any] | None = None,
        hook_state: Any = None,
        wrapper: str | None = None,
        save_residual: str = "per_rank",
        strict: bool = True,
        check_every: int | None = None,
        ranks_per_node: RanksPerNode = None,
    ) -> "HookRequest":
        """Make a request from the user's arguments; see `attach` for them.

        Raises:
            HookConfigError: unknown hook or option, wrong type, or invalid combination; the message names it.
        """
        hook_options = plain("hook_options: ", hook_options)
        check_choice("wrapper", wrapper, (None, *WRAPPERS))
        check_choice("save_residual", save_residual, SAVE_RESIDUAL)
        if not isinstance(strict, bool):
            raise HookConfigError(f"strict={strict!r}; expected True or False")
        if hook_options is not None and not isinstance(hook_options, Mapping):
            raise HookConfigError(f"hook_options={hook_options!r}; expected a dict of options")
        if check_every is not None and (
            not isinstance(check_every, int) or isinstance(check_every, bool) or check_every < 1
        ):
            raise HookConfigError(f"check_every={check_every!r}; expected a number of steps, 1 or more, or None")
        _check_ranks_per_node(ranks_per_node)
        common: dict[str, Any] = {
            "wrapper": wrapper,
            "save_residual": save_residual,
            "strict": strict,
            "check_every": check_every,
            "ranks_per_node": ranks_per_node,
        }

        if means_no_hook(hook):
            unused = {"hook_options": hook_options, "hook_state": hook_state, "wrapper": wrapper}
            unused |= {"check_every": check_every, "ranks_per_node": ranks_per_node}
            given = tuple(name for name, value in unused.items() if value is not None)
            return cls(OFF, save_residual=save_residual, strict=strict, ignored=given)
        if isinstance(hook, type) and issubclass(hook, Compressor):
            hook = register_compressor(hook).Config.hook_name
        if isinstance(hook, HookConfig):
            if hook_options:
                raise HookConfigError(
                    f"hook_options={dict(hook_options)!r} beside {type(hook).__name__}(...): hook_options is for hooks "
                    f"given by name; write the options into {type(hook).__name__}(...)"
                )
            compressor_of(hook)  # raises if there is none
            return cls._from_config(hook, hook_state, common)
        if isinstance(hook, type) and issubclass(hook, HookConfig):
            raise HookConfigError(f"hook={hook.__name__} is a class; write {hook.__name__}() with its options inside")
        if isinstance(hook, str):
            if ":" in hook:
                found = _import_hook(hook)
                if isinstance(found, type) and issubclass(found, (Compressor, HookConfig)):
                    config = found if issubclass(found, HookConfig) else register_compressor(found).Config
                    made = from_options(config, hook_options or {})
                    compressor_of(made)
                    return cls._from_config(made, hook_state, common)
                return cls._from_function(found, hook_options, hook_state, common, name=hook)
            name = canonical_name(hook)
            if name is None:
                names = hook_names()
                package, dot, function = hook.rpartition(".")
                hint = f" (for a function of your own write '{package}:{function}')" if dot and package else ""
                offer = hint or closest(hook, [*names_to_offer(), *aliases()])
                raise HookConfigError(
                    f"unknown hook {hook!r}{offer}; known are {', '.join(names)}, and "
                    "'package.module:function' for one of your own; 'none' trains without a hook"
                )
            if name in COMPRESSORS:
                made = from_options(COMPRESSORS[name].Config, hook_options or {})
                return cls._from_config(made, hook_state, common)
            _no_state(name, hook_state)
            _no_nodes(name, common)
            _check_wrapper(wrapper, tuple(WIRE_DTYPES), f"hook {name!r}")
            return cls(name, factory=name, options=dict(hook_options or {}), **common)
        if callable(hook):
            return cls._from_function(hook, hook_options, hook_state, common)
        raise HookConfigError(
            f"hook={hook!r} is a {type(hook).__name__}; expected a config object such as commhooks.PowerSGD(), a name, "
            "'package.module:function', or a callable (state, bucket); None trains without a hook"
        )

    @classmethod
    def _from_config(cls, config: HookConfig, hook_state: Any, common: dict[str, Any]) -> "HookRequest":
        _no_state(config.hook_name, hook_state)
        if common["check_every"] is not None and not config.sends:
            raise HookConfigError(
                f"check_every with hook {config.hook_name!r}: without communication the replicas drift apart"
            )
        compressor = compressor_of(config)
        if common["ranks_per_node"] is not None and compressor.not_between_nodes():
            raise HookConfigError(
                f"ranks_per_node with hook {config.hook_name!r}, which {compressor.not_between_nodes()}: it works with "
                "hooks such as 'powerSGD', 'int8_compress' and 'bf16_compress'"
            )
        _check_wrapper(common["wrapper"], compressor.wrappers, f"hook {config.hook_name!r}")
        return cls(config.hook_name, config=config, **common)

    @classmethod
    def _from_function(
        cls,
        function: Callable[..., Any],
        hook_options: Mapping[str, Any] | None,
        hook_state: Any,
        common: dict[str, Any],
        name: str | None = None,
    ) -> "HookRequest":
        name = name or str(getattr(function, "__qualname__", type(function).__qualname__))
        _no_nodes(name, common)
        if hook_options:
            raise HookConfigError(
                f"hook_options={dict(hook_options)!r} with the callable {name}: hook_options is for hooks given by "
                "name; put the options of a callable into its hook_state, or register a factory with register_hook"
            )
        drop_in = next((each for ours, each in DROP_INS.items() if ours is function), None)
        if drop_in is not None:
            name = drop_in.hook_name
            if hook_state is None:
                return cls._from_config(COMPRESSORS[name].Config(), None, common)
            if drop_in.state_class is not None and not isinstance(hook_state, drop_in.state_class):
                raise HookConfigError(
                    f"hook_state={hook_state!r} with {function.__name__}; expected a "
                    f"commhooks.{drop_in.state_class.__name__}, or no state for one with the defaults of "
                    f"commhooks.{COMPRESSORS[name].Config.__name__}"
                )
        _check_wrapper(common["wrapper"], tuple(WIRE_DTYPES), f"the function {name}")
        return cls(name, function=function, hook_state=hook_state, **common)

    @property
    def off(self) -> bool:
        """Whether the user asks for training without a hook."""
        return self.config is None and self.factory is None and self.function is None

    def as_plain_average(self) -> "HookRequest":
        """The same request with the hook that averages exactly, for models whose gradients nobody else averages."""
        return dataclasses.replace(self, name=AllReduce.hook_name, config=AllReduce(), ignored=())

    @property
    def form(self) -> str:
        """The `save_residual` as the user gave it."""
        return "distributed" if self.distributed else self.save_residual

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The dtype to which the hook or its wrapper casts what it sends; None: gradients are sent in their own
        dtype."""
        known = COMPRESSORS.get(self.name)
        wire = self.wrapper or (known.Config.own_wire if known is not None else None)
        return None if wire is None else WIRE_DTYPES.get(wire)

    def new_compressor(self, total_steps: int | None = None) -> Compressor[Any] | None:
        """The requested compressor, with its start as a number of steps; None for a user's hook, and without a hook.

        Args:
            total_steps: synchronised backward passes in the whole run, if known.

        Raises:
            HookConfigError: the start is a fraction and `total_steps` is None.
        """
        if self.config is None:
            return None
        made = compressor_of(self.config)(self.config.resolved(total_steps))
        return made if self.wrapper is None else made.wrapped(self.wrapper)

    def build(self, process_group: dist.ProcessGroup | None) -> tuple[Any, Callable[..., Any]]:
        """The state and the function of a user's hook."""
        if self.factory is not None:
            made = FACTORIES[self.factory](dict(self.options), process_group)
            if not isinstance(made, tuple) or len(made) != 2 or not callable(made[1]):
                raise HookConfigError(
                    f"the factory of hook {self.name!r} returned {made!r}; expected a pair (state, callable hook)"
                )
            return made
        assert self.function is not None
        return self.hook_state, self.function


def _import_hook(path: str) -> Callable[..., Any]:
    found = import_path(path, f"hook {path!r}")
    if not callable(found):
        raise HookConfigError(f"hook {path!r} is a {type(found).__name__}, not a callable (state, bucket)")
    return found


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise HookConfigError unless `value`, of the argument `name`, is one of `choices`."""
    if value not in choices:
        offer = closest(value, [c for c in choices if isinstance(c, str)]) if isinstance(value, str) else ""
        raise HookConfigError(f"{name}={value!r}{offer}; expected one of {', '.join(map(repr, choices))}")


def _check_ranks_per_node(value: object) -> None:
    if value is None or value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return
    raise HookConfigError(f"ranks_per_node={value!r}; expected 'auto', a number of ranks, 1 or more, or None")


def _no_nodes(name: str, common: Mapping[str, Any]) -> None:
    if common["ranks_per_node"] is not None:
        raise HookConfigError(
            f"ranks_per_node with the hook {name}, a function: write a compressor instead, which works between nodes"
        )


def _check_wrapper(wrapper: str | None, possible: tuple[str, ...], hook: str) -> None:
    """Raise HookConfigError unless `wrapper` is None or one of `possible`."""
    if wrapper is None or wrapper in possible:
        return
    if not possible:
        raise HookConfigError(f"wrapper={wrapper!r} with {hook}, which chooses itself what to send: omit wrapper")
    others = [name for name, each in COMPRESSORS.items() if wrapper in each.wrappers]
    raise HookConfigError(
        f"wrapper={wrapper!r} with {hook}: it is for {' and '.join(map(repr, others))}, given by name or by config; "
        f"hook='{wrapper}_compress' quantises gradients as they are"
    )


def _no_state(name: str, hook_state: Any) -> None:
    if hook_state is not None:
        raise HookConfigError(
            f"hook_state with hook {name!r}, which makes its own state: hook_state is for a callable of your own"
        )
