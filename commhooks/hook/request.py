"""A user's request for a hook, checked at once: no model and no process group are needed."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.nodes import RanksPerNode
from commhooks.comm.wire import WIRE_DTYPES
from commhooks.compressors.base import Compressor
from commhooks.compressors.cast import AllReduce
from commhooks.compressors.dotted_path import import_path
from commhooks.compressors.hook_config import HookConfig, from_options
from commhooks.compressors.plain_values import plain
from commhooks.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from commhooks.errors import HookConfigError, did_you_mean
from commhooks.hook.vocabulary import ARGUMENTS, check_arguments
from commhooks.registry import (
    COMPRESSORS,
    FACTORIES,
    OFF,
    aliases,
    canonical_name,
    compressor_of,
    hook_names,
    means_no_hook,
    names_to_offer,
    register_compressor,
)

_DROP_INS: dict[Callable[..., Any], str] = {
    default_hooks.allreduce_hook: "allreduce",
    default_hooks.fp16_compress_hook: "fp16_compress",
    default_hooks.bf16_compress_hook: "bf16_compress",
    debugging_hooks.noop_hook: "noop",
    powerSGD_hook.powerSGD_hook: "powerSGD",
    powerSGD_hook.batched_powerSGD_hook: "batched_powerSGD",
}
"""The hooks for which torch's names stand: such a function without a state is the hook of that name."""


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
    save_residual: str = ARGUMENTS["save_residual"].default
    strict: bool = True
    check_every: int | None = None
    ranks_per_node: RanksPerNode = None
    distributed: bool = False
    """`state_dict()` has the form for `torch.distributed.checkpoint`. Always so for sharded models."""
    ignored: tuple[str, ...] = ()
    """The given arguments that are of no use without a hook."""

    @classmethod
    def parse(
        cls, hook: object, *, hook_options: Mapping[str, Any] | None = None, hook_state: Any = None, **common: Any
    ) -> "HookRequest":
        """Make a request from the user's arguments; see `attach` for them.

        Args:
            common: wrapper, save_residual, strict, check_every, ranks_per_node. A total_steps is checked, too.

        Raises:
            HookConfigError: unknown hook or option, wrong type, or invalid combination; the message names it.
        """
        check_arguments(common)
        common.pop("total_steps", None)
        hook_options = plain("hook_options: ", hook_options)
        if hook_options is not None and not isinstance(hook_options, Mapping):
            raise HookConfigError(f"hook_options={hook_options!r}; expected a dict of options")
        options = dict(hook_options or {})
        if means_no_hook(hook):
            unused = ("wrapper", "check_every", "ranks_per_node")
            given = {"hook_options": hook_options, "hook_state": hook_state} | {
                each: common.get(each) for each in unused
            }
            rest = {name: value for name, value in common.items() if name not in unused}
            return cls(OFF, ignored=tuple(name for name, value in given.items() if value is not None), **rest)
        found, common["hook_state"] = _found(hook), hook_state
        if isinstance(found, type) and issubclass(found, HookConfig):
            found, options = from_options(found, options), {}
        if isinstance(found, str):
            request = cls(found, factory=found, options=options, **common)
        elif isinstance(found, HookConfig):
            if options:
                raise HookConfigError(
                    f"hook_options={options!r} beside {type(found).__name__}(...): hook_options is for hooks given by "
                    f"name; write the options into {type(found).__name__}(...)"
                )
            request = cls(found.hook_name, config=found, **common)
        else:
            name = hook if isinstance(hook, str) else str(getattr(found, "__qualname__", type(found).__qualname__))
            if options:
                raise HookConfigError(
                    f"hook_options={options!r} with the callable {name}: hook_options is for hooks given by name; put "
                    "the options of a callable into its hook_state, or register a factory with register_hook"
                )
            request = cls._of_function(name, found, common)
        return request._checked()

    @classmethod
    def _of_function(cls, name: str, function: Callable[..., Any], common: dict[str, Any]) -> "HookRequest":
        drop_in = next((hook for ours, hook in _DROP_INS.items() if ours is function), None)
        if drop_in is None:
            return cls(name, function=function, **common)
        config, state = COMPRESSORS[drop_in].Config, common["hook_state"]
        if state is None:
            return cls(drop_in, config=config(), **common)
        if drop_in in ("powerSGD", "batched_powerSGD") and not isinstance(state, powerSGD_hook.PowerSGDState):
            raise HookConfigError(
                f"hook_state={state!r} with {function.__name__}; expected a commhooks.PowerSGDState, or no state for "
                f"one with the defaults of commhooks.{config.__name__}"
            )
        return cls(drop_in, function=function, **common)

    def _checked(self) -> "HookRequest":
        """Return self if the hook and the other arguments can be combined.

        Raises:
            HookConfigError: they cannot.
        """
        compressor = None if self.config is None else compressor_of(self.config)
        hook = f"hook {self.name!r}" if self.function is None else f"the function {self.name}"
        if self.hook_state is not None and self.function is None:
            raise HookConfigError(
                f"hook_state with {hook}, which makes its own state: hook_state is for a callable of your own"
            )
        if self.check_every is not None and self.config is not None and not self.config.sends:
            raise HookConfigError(f"check_every with {hook}: without communication the replicas drift apart")
        if self.ranks_per_node is not None:
            if compressor is None:
                raise HookConfigError(
                    f"ranks_per_node with the hook {self.name}, a function: write a compressor instead, which works "
                    "between nodes"
                )
            if compressor.not_between_nodes():
                raise HookConfigError(
                    f"ranks_per_node with {hook}, which {compressor.not_between_nodes()}: name a hook such as "
                    "'powerSGD', 'int8_compress' or 'bf16_compress', or leave out ranks_per_node"
                )
        if self.wrapper is not None and compressor is not None and not compressor.wrappers:
            wire = " and set its option wire" if hasattr(compressor.Config, "wire") else ""
            raise HookConfigError(
                f"wrapper={self.wrapper!r} with {hook}, which chooses itself what to send: omit wrapper{wire}"
            )
        return self

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
        return made if self.wrapper is None else made.lowered(WIRE_DTYPES[self.wrapper])

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


def _found(hook: Any) -> HookConfig | type[HookConfig] | str | Callable[..., Any]:
    """What the argument `hook` stands for: a config, the config class of a hook by name, the name of a factory, or a
    function."""
    if isinstance(hook, type) and issubclass(hook, HookConfig):
        raise HookConfigError(f"hook={hook.__name__} is a class; write {hook.__name__}() with its options inside")
    if isinstance(hook, HookConfig):
        compressor_of(hook)  # raises if there is none
        return hook
    found = import_path(hook, f"hook {hook!r}") if isinstance(hook, str) and ":" in hook else hook
    if isinstance(found, type) and issubclass(found, Compressor):
        return register_compressor(found).Config
    if callable(found):
        return found
    if found is not hook:
        raise HookConfigError(f"hook {hook!r} is a {type(found).__name__}, not a callable (state, bucket)")
    if not isinstance(hook, str):
        raise HookConfigError(
            f"hook={hook!r} is a {type(hook).__name__}; expected a config object such as commhooks.PowerSGD(), a name, "
            "'package.module:function', or a callable (state, bucket); None trains without a hook"
        )
    name = canonical_name(hook)
    if name is None:
        package, _, function = hook.rpartition(".")
        hint = f" (for a function of your own write '{package}:{function}')" if package else ""
        raise HookConfigError(
            f"unknown hook {hook!r}{hint or did_you_mean(hook, [*names_to_offer(), *aliases()])}; known are "
            f"{', '.join(hook_names())}, and 'package.module:function' for one of your own; 'none' trains without a "
            "hook"
        )
    return COMPRESSORS[name].Config if name in COMPRESSORS else name
