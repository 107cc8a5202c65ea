"""Check a user's request for a hook, without a model or a process group.

The front ends are `attach`, the strategies for Lightning and Fabric, Accelerate's handler and YAML,
and flags. Their signatures repeat names and defaults for editors and jsonargparse; the docstring of
`attach` explains the arguments.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from commhooks.comm.nodes import RanksPerNode
from commhooks.comm.packing import WIRE_DTYPES
from commhooks.compressors.base import Compressor
from commhooks.compressors.cast import AllReduce
from commhooks.errors import (
    HookConfigError,
    did_you_mean,
    invalid,
    no_such,
    print_error_on_rank_zero,
)
from commhooks.import_path import import_path
from commhooks.options import DROP_INS, HookConfig, check_choice, converted, plain
from commhooks.registry import (
    COMPRESSORS,
    FACTORIES,
    OFF,
    aliases,
    canonical_name,
    compressor_of,
    means_no_hook,
    names_to_offer,
    register_compressor,
)

if TYPE_CHECKING:
    from commhooks.members.options import Torchft
    from commhooks.sharded.options import Shards

P = ParamSpec("P")
T = TypeVar("T")

WRAPPERS = tuple(WIRE_DTYPES)
SAVE_RESIDUAL = ("mean", "per_rank", "drop")

# ---- the shared arguments
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Argument:
    """Describes an argument shared by all front ends.

    Attributes:
        kind: the type in YAML; in Python, `hook` and `hook_state` may be other objects.
        choices: the valid values; empty: all values of the type.
        expected: the valid values in words, for messages.
    """

    kind: Any
    default: Any = None
    choices: tuple[str | None, ...] = ()
    expected: str = ""


_STEPS = "a number of steps, 1 or more, or None"
ARGUMENTS = {
    "hook": Argument(str),
    "hook_options": Argument(dict[str, Any] | None),
    "hook_state": Argument(str | None),
    "wrapper": Argument(str | None, choices=(None, *WRAPPERS)),
    "save_residual": Argument(str, "per_rank", choices=SAVE_RESIDUAL),
    "strict": Argument(bool, True),
    "total_steps": Argument(int | None, expected=_STEPS),
    "check_every": Argument(int | None, expected=_STEPS),
    "ranks_per_node": Argument(
        int | str | None, expected="'auto', a number of ranks, 1 or more, or None"
    ),
    "members": Argument(str | None, choices=(None, "torchft")),
    "shards": Argument(str | None, choices=(None, "int8", "bf16")),
}


def check_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return `arguments` with the shared ones converted to their types.

    Does not check `hook`, `hook_options` and `hook_state`. Raises HookConfigError if a value has
    the wrong type or is out of range.
    """
    checked = dict(arguments)
    for name, argument in ARGUMENTS.items():
        if name in arguments and argument.choices:
            check_choice(name, arguments[name], argument.choices)
        elif name in arguments and not name.startswith("hook"):
            checked[name] = check_value(name, arguments[name], argument.kind, argument.expected)
    return checked


def check_value(where: str, value: Any, kind: Any, expected: str = _STEPS) -> Any:
    """Return `value` converted to `kind`. Raises HookConfigError if it cannot be converted, is a
    number below 1, or is text other than "auto".
    """
    read = converted(where, value, kind, expected)
    if isinstance(read, str):
        valid = read == "auto"
    else:
        valid = read is None or isinstance(read, bool) or read >= 1
    if not valid:
        raise invalid(where, value, expected)
    return read


def arguments_in(scope: dict[str, Any]) -> dict[str, Any]:
    """Return the shared arguments in `scope`, which is the `locals()` of a front end's function."""
    return {name: scope[name] for name in ARGUMENTS if name in scope}


def suggests_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: raise HookConfigError for an unknown keyword argument, with the closest name.

    Rank 0 prints the message of every CommHookError.
    """
    parameters = inspect.signature(function).parameters
    names = [name for name in parameters if name != "self"]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        with print_error_on_rank_zero():
            for name in kwargs:
                if name not in names and not takes_all:
                    caller = function.__name__
                    if caller == "__init__":
                        caller = type(args[0]).__name__
                    raise no_such(caller, "argument", name, names)
            return function(*args, **kwargs)

    return checked


# ---- the request
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HookRequest:
    """Holds a checked request for a hook.

    At most one of `config`, `factory` and `function` is set; if none is, there is no hook.
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
    total_steps: int | None = None
    check_every: int | None = None
    ranks_per_node: RanksPerNode = None
    members: "Torchft | None" = None
    shards: "Shards | None" = None
    distributed: bool = False
    """Whether `state_dict()` returns the form for `torch.distributed.checkpoint`. Sharded models
    always have this form.
    """
    ignored: tuple[str, ...] = ()
    """Arguments that the user passed but that have no effect without a hook."""

    @classmethod
    def parse(
        cls,
        hook: object,
        *,
        hook_options: Mapping[str, Any] | None = None,
        hook_state: Any = None,
        **common: Any,
    ) -> "HookRequest":
        """Make a request from the user's arguments; see `attach`.

        `common`: the other shared arguments. Raises HookConfigError for an unknown hook or option,
        a wrong type, or an invalid combination.
        """
        common = _checked_common(common)
        options = _checked_options(hook_options)
        if means_no_hook(hook):
            return cls._without_hook(hook_options, hook_state, common)
        common["hook_state"] = hook_state
        resolved = _resolved(hook)
        if isinstance(resolved, type):
            config = resolved(**options)
            return cls(config.hook_name, config=config, **common)
        if isinstance(resolved, str):
            return cls(resolved, factory=resolved, options=options, **common)
        if isinstance(resolved, HookConfig):
            subject = f"{type(resolved).__name__}(...)"
            remedy = "put the options into it"
            request = cls(resolved.hook_name, config=resolved, **common)
        else:
            named = hook if isinstance(hook, str) else getattr(resolved, "__qualname__", None)
            name = named or type(resolved).__qualname__
            subject = f"the callable {name}"
            remedy = "put its options into hook_state, or use register_hook"
            request = cls._of_callable(name, resolved, common)
        if options:
            raise HookConfigError(
                f"hook_options={options!r} with {subject}: hook_options is for hooks given by"
                f" name; {remedy}"
            )
        return request

    @classmethod
    def _without_hook(
        cls, hook_options: object, hook_state: object, common: dict[str, Any]
    ) -> "HookRequest":
        unused = {"hook_options": hook_options, "hook_state": hook_state}
        for name in ("wrapper", "check_every", "ranks_per_node", "members"):
            unused[name] = common.pop(name, None)
        ignored = tuple(name for name, value in unused.items() if value is not None)
        name = OFF if common["shards"] is None else "shards"
        if ignored and common["shards"] is not None:
            raise HookConfigError(
                f"{' and '.join(ignored)} with shards and hook=None: they are for a hook that"
                " averages gradients, such as 'allreduce'; the options of shards go into"
                " commhooks.Shards(...)"
            )
        return cls(name, ignored=ignored, **common)

    @classmethod
    def _of_callable(
        cls, name: str, function: Callable[..., Any], common: dict[str, Any]
    ) -> "HookRequest":
        """Make the request for a function; one of torch's names may stand for a built-in hook."""
        # Not by key: a callable object may be unhashable.
        drop_in = next((entry for key, entry in DROP_INS.items() if key is function), None)
        if drop_in is None:
            return cls(name, function=function, **common)
        if common["hook_state"] is None:
            return cls(drop_in.hook, config=COMPRESSORS[drop_in.hook].Config(), **common)
        drop_in.check_state(common["hook_state"])
        return cls(drop_in.hook, function=function, **common)

    def __post_init__(self) -> None:
        compressor = None if self.config is None else compressor_of(self.config)
        hook = f"hook {self.name!r}" if self.function is None else f"the function {self.name}"
        if self.hook_state is not None and self.function is None:
            raise HookConfigError(
                f"hook_state with {hook}, which makes its own state: hook_state is for a callable"
                " of your own"
            )
        if self.check_every is not None and self.config is not None and not self.config.sends:
            raise HookConfigError(
                f"check_every with {hook}: without communication the replicas drift apart"
            )
        if self.ranks_per_node is not None and compressor is None:
            raise HookConfigError(
                f"ranks_per_node with the hook {self.name}, a function: write a compressor instead,"
                " which works between nodes"
            )
        alone = "" if compressor is None else _not_between_nodes(compressor)
        if self.ranks_per_node is not None and alone:
            raise HookConfigError(
                f"ranks_per_node with {hook}, which {alone}: name a hook such as "
                "'powerSGD', 'int8_compress' or 'bf16_compress', or leave out ranks_per_node"
            )
        if self.wrapper is not None and compressor is not None and not compressor.wrappers:
            wire = " and set its option wire" if hasattr(compressor.Config, "wire") else ""
            raise HookConfigError(
                f"wrapper={self.wrapper!r} with {hook}, which itself chooses what it sends: omit"
                f" wrapper{wire}"
            )

        if self.members is not None:
            self._check_members(hook)

    def _check_members(self, hook: str) -> None:
        config = self.config
        if not self.averages_weights:
            raise HookConfigError(
                f"members with {hook}, which averages gradients: machines can come and go only with"
                " hooks that average weights, 'diloco' and 'local_sgd'"
            )
        if self.ranks_per_node is not None:
            raise HookConfigError(
                "members with ranks_per_node: the ranks of a machine are known; leave it out"
            )
        if start_iter := getattr(config, "start_iter", 0):
            raise HookConfigError(
                f"members with start_iter={start_iter}; expected 0, because machines exchange"
                " weights only"
            )

    @property
    def averages_weights(self) -> bool:
        return self.config is not None and self.config.averages_weights

    @property
    def off(self) -> bool:
        """Whether nothing is attached."""
        return self._has_no_hook and self.shards is None

    @property
    def shards_alone(self) -> bool:
        """Whether FSDP2's own collectives are compressed, and there is no hook."""
        return self._has_no_hook and self.shards is not None

    @property
    def _has_no_hook(self) -> bool:
        return self.config is None and self.factory is None and self.function is None

    def as_plain_average(self) -> "HookRequest":
        return dataclasses.replace(self, name=AllReduce.hook_name, config=AllReduce(), ignored=())

    @property
    def given_save_residual(self) -> str:
        """The `save_residual` that the user passed."""
        return "distributed" if self.distributed else self.save_residual

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The dtype to which the hook or its wrapper casts what it sends; None: the gradients'
        dtype.
        """
        wire = self.wrapper
        if wire is None and self.name in COMPRESSORS:
            wire = COMPRESSORS[self.name].Config.own_wire
        return None if wire is None else WIRE_DTYPES.get(wire)

    def new_compressor(self, total_steps: int | None = None) -> Compressor[Any] | None:
        """Make the requested compressor, with its start as a number of steps. Returns None for a
        user's function and without a hook. Raises HookConfigError if the start is a fraction and
        `total_steps` is None.
        """
        if self.config is None:
            return None
        resolved = self.config.resolved(total_steps)
        made = compressor_of(self.config)
        return made(resolved) if self.wrapper is None else made(resolved, WIRE_DTYPES[self.wrapper])

    def build(self, process_group: dist.ProcessGroup | None) -> tuple[Any, Callable[..., Any]]:
        if self.factory is not None:
            made = FACTORIES[self.factory](dict(self.options), process_group)
            if not isinstance(made, tuple) or len(made) != 2 or not callable(made[1]):
                raise HookConfigError(
                    f"the factory of hook {self.name!r} returned {made!r}; expected a pair (state,"
                    " callable hook)"
                )
            return made
        assert self.function is not None
        return self.hook_state, self.function


def _checked_common(common: dict[str, Any]) -> dict[str, Any]:
    members = common.pop("members", None)
    if members is not None:
        from commhooks.members.options import torchft_of  # here, because few runs need it

        members = torchft_of(members)
    shards = common.pop("shards", None)
    if shards is not None:
        from commhooks.sharded.options import shards_of

        shards = shards_of(shards)
    return check_arguments(common) | {"members": members, "shards": shards}


def _checked_options(hook_options: object) -> dict[str, Any]:
    options = plain("hook_options", hook_options)
    if not isinstance(options, Mapping | None):
        raise invalid("hook_options", options, "a dict of options")
    return {
        str(name): plain(f"hook_options: {name}", value) for name, value in (options or {}).items()
    }


def _resolved(hook: Any) -> HookConfig | type[HookConfig] | str | Callable[..., Any]:
    """Return the config, config class, name of a factory, or function that `hook` stands for."""
    if isinstance(hook, type) and issubclass(hook, HookConfig):
        raise HookConfigError(
            f"hook={hook.__name__} is a class; write {hook.__name__}() with its options inside"
        )
    if isinstance(hook, HookConfig):
        compressor_of(hook)  # raises if there is none
        return hook
    is_path = isinstance(hook, str) and ":" in hook
    target = import_path(hook, f"hook {hook!r}") if is_path else hook
    if isinstance(target, type) and issubclass(target, Compressor):
        return register_compressor(target).Config
    if callable(target):
        return target
    if is_path:
        raise HookConfigError(
            f"hook {hook!r} is a {type(target).__name__}, not a callable (state, bucket)"
        )
    if not isinstance(hook, str):
        raise HookConfigError(
            f"hook={hook!r} is a {type(hook).__name__}; expected a config object such as"
            " commhooks.PowerSGD(), a name, 'package.module:function', or a callable (state,"
            " bucket); None trains without a hook"
        )
    name = canonical_name(hook)
    if name is None:
        package, _, function = hook.rpartition(".")
        hint = f" (for a function of your own write '{package}:{function}')" if package else ""
        raise HookConfigError(
            f"unknown hook {hook!r}{hint or did_you_mean(hook, [*names_to_offer(), *aliases()])};"
            f" known are {', '.join([*COMPRESSORS, *FACTORIES])}, and 'package.module:function' for"
            " one of your own; 'none' trains without a hook"
        )
    return COMPRESSORS[name].Config if name in COMPRESSORS else name


# ---- the user's own objects
# ------------------------------------------------------------------------------------------


def why_not_called(function: Callable[..., Any], *arguments: object) -> str:
    """Return why `function` cannot be called with these arguments; "" if it can, or if it has no
    signature.
    """
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return str(error)
    except ValueError:  # a builtin
        pass
    return ""


def _not_between_nodes(compressor: type[Compressor[Any]]) -> str:
    if not compressor.Config.sends:
        return "sends nothing"
    return "" if compressor.plan is Compressor.plan else "compresses whole buckets"
