"""What the user asked for, checked when it is asked: before there is a model, a process group or a training run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from commhooks.checkpoint.payload import SAVE_RESIDUAL
from commhooks.comm.wire import WIRE_DTYPES
from commhooks.compressors.config import CONFIGS, HookConfig, Noop, PowerSGD, closest, from_options
from commhooks.compressors.dotted_path import import_path
from commhooks.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from commhooks.errors import HookConfigError

Factory = Callable[[dict[str, Any], dist.ProcessGroup | None], tuple[Any, Callable[..., Any]]]

ALIASES = {"fp16": "fp16_compress", "bf16": "bf16_compress"}
# The function behind each config class: a request for the function without a state means the config.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16_compress": default_hooks.fp16_compress_hook,
    "bf16_compress": default_hooks.bf16_compress_hook,
    "noop": debugging_hooks.noop_hook,
    "powerSGD": powerSGD_hook.powerSGD_hook,
    "batched_powerSGD": powerSGD_hook.batched_powerSGD_hook,
}
# Users' own hooks by name. The one table of this package that outlives a call: `register_hook` is there to fill it.
_REGISTERED: dict[str, Factory] = {}


def register_hook(name: str, factory: Factory) -> None:
    """Make a hook of your own available by name, in Python, YAML and on the command line.

    Args:
        name: must not be taken.
        factory: `factory(options: dict, process_group) -> (state, hook)`, called when a model is wrapped, on every
            rank. `hook` has the signature `(state, bucket) -> torch.futures.Future[torch.Tensor]`; a state with
            `state_dict` and `load_state_dict` (plain types and tensors) is saved and restored.

    Raises:
        HookConfigError: the name is taken or not a name, or the factory is not callable.
    """
    if not isinstance(name, str) or not name or ":" in name or any(letter.isspace() for letter in name):
        raise HookConfigError(f"register_hook: name={name!r}; expected a word without ':' and spaces")
    if not callable(factory):
        raise HookConfigError(f"register_hook({name!r}): the factory is a {type(factory).__name__}, not callable")
    if canonical_name(name) is not None:
        raise HookConfigError(f"register_hook: the name {name!r} is taken by {canonical_name(name)!r}")
    _REGISTERED[name] = factory


def available_hooks() -> dict[str, dict[str, Any]]:
    """Name -> {"description": one line, "options": {option: default}} of every hook that can be had by name."""
    import dataclasses

    hooks: dict[str, dict[str, Any]] = {}
    for name, config in CONFIGS.items():
        hooks[name] = {
            "description": (config.__doc__ or "").strip().splitlines()[0],
            "options": dataclasses.asdict(config()),
        }
    for name, factory in _REGISTERED.items():
        lines = (factory.__doc__ or "registered by register_hook").strip().splitlines()
        hooks[name] = {"description": lines[0], "options": {}}
    return hooks


def canonical_name(name: str) -> str | None:
    """The name under which a hook is known, or None. Case, `_` and `-` do not matter."""

    def plain(text: str) -> str:
        return text.lower().replace("_", "").replace("-", "")

    names = {plain(known): known for known in (*CONFIGS, *_REGISTERED)}
    names |= {plain(alias): known for alias, known in ALIASES.items()}
    return names.get(plain(name))


@dataclass(frozen=True)
class HookSpec:
    """A checked request for a hook. Picklable if what it holds is.

    Exactly one of `config`, `factory` and `function` says what to run.
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

    @classmethod
    def parse(
        cls,
        hook: HookConfig | Callable[..., Any] | str,
        *,
        hook_options: Mapping[str, Any] | None = None,
        hook_state: Any = None,
        wrapper: str | None = None,
        save_residual: str = "per_rank",
        strict: bool = True,
        check_every: int | None = None,
    ) -> "HookSpec":
        """Check what the user gave.

        Raises:
            HookConfigError: unknown hook or option, wrong type, impossible combination; the text names the offender.
        """
        _check_choice("wrapper", wrapper, (None, *WIRE_DTYPES))
        _check_choice("save_residual", save_residual, SAVE_RESIDUAL)
        if not isinstance(strict, bool):
            raise HookConfigError(f"strict={strict!r}; expected True or False")
        if hook_options is not None and not isinstance(hook_options, Mapping):
            raise HookConfigError(f"hook_options={hook_options!r}; expected a dict of options")
        if check_every is not None and (
            not isinstance(check_every, int) or isinstance(check_every, bool) or check_every < 1
        ):
            raise HookConfigError(f"check_every={check_every!r}; expected a number of steps, 1 or more, or None")
        if check_every is not None and (isinstance(hook, Noop) or hook == "noop"):
            raise HookConfigError("check_every with hook 'noop': without communication the replicas drift apart")
        common: dict[str, Any] = {
            "wrapper": wrapper,
            "save_residual": save_residual,
            "strict": strict,
            "check_every": check_every,
        }

        if isinstance(hook, HookConfig):
            if hook_options:
                raise HookConfigError(
                    f"hook_options={dict(hook_options)!r} beside {type(hook).__name__}(...): hook_options is for hooks "
                    f"given by name; write the options into {type(hook).__name__}(...)"
                )
            _no_state(hook.hook_name, hook_state)
            return cls(hook.hook_name, config=hook, **common)
        if isinstance(hook, type) and issubclass(hook, HookConfig):
            raise HookConfigError(f"hook={hook.__name__} is a class; write {hook.__name__}() with its options inside")
        if isinstance(hook, str):
            if ":" in hook:
                return cls._from_function(_import_hook(hook), hook_options, hook_state, common, name=hook)
            name = canonical_name(hook)
            if name is None:
                names = list(available_hooks())
                package, dot, function = hook.rpartition(".")
                hint = f" (for a function of your own write '{package}:{function}')" if dot and package else ""
                raise HookConfigError(
                    f"unknown hook {hook!r}{hint or closest(hook, names)}; known are {', '.join(names)}, and "
                    "'package.module:function' for one of your own"
                )
            _no_state(name, hook_state)
            if name in CONFIGS:
                return cls(name, config=from_options(CONFIGS[name], hook_options or {}), **common)
            return cls(name, factory=name, options=dict(hook_options or {}), **common)
        if callable(hook):
            return cls._from_function(hook, hook_options, hook_state, common)
        raise HookConfigError(
            f"hook={hook!r} is a {type(hook).__name__}; expected a config object such as commhooks.PowerSGD(), a name, "
            "'package.module:function', or a callable (state, bucket)"
        )

    @classmethod
    def _from_function(
        cls,
        function: Callable[..., Any],
        hook_options: Mapping[str, Any] | None,
        hook_state: Any,
        common: dict[str, Any],
        name: str | None = None,
    ) -> "HookSpec":
        name = name or str(getattr(function, "__qualname__", type(function).__qualname__))
        if hook_options:
            raise HookConfigError(
                f"hook_options={dict(hook_options)!r} with the callable {name}: hook_options is for hooks given by "
                "name; put the options of a callable into its hook_state, or register a factory with register_hook"
            )
        for known, ours in FUNCTIONS.items():
            if function is ours:
                name = known
                if hook_state is None:
                    return cls(known, config=CONFIGS[known](), **common)
                if issubclass(CONFIGS[known], PowerSGD) and not isinstance(hook_state, powerSGD_hook.PowerSGDState):
                    raise HookConfigError(
                        f"hook_state={hook_state!r} with {function.__name__}; expected a commhooks.PowerSGDState, or "
                        "no state for one with the defaults of commhooks.PowerSGD"
                    )
        return cls(name, function=function, hook_state=hook_state, **common)

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """To which the hook or its wrapper narrows what it sends; None: gradients travel in their own dtype."""
        known = CONFIGS.get(self.name)
        wire = self.wrapper or (known.own_wire if known is not None else None)
        return WIRE_DTYPES[wire] if wire is not None else None

    def build(self, process_group: dist.ProcessGroup | None) -> tuple[Any, Callable[..., Any]]:
        """State and function of a hook that is the user's own."""
        if self.factory is not None:
            made = _REGISTERED[self.factory](dict(self.options), process_group)
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


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        offer = closest(value, [c for c in choices if isinstance(c, str)]) if isinstance(value, str) else ""
        raise HookConfigError(f"{name}={value!r}{offer}; expected one of {', '.join(map(repr, choices))}")


def _no_state(name: str, hook_state: Any) -> None:
    if hook_state is not None:
        raise HookConfigError(
            f"hook_state with hook {name!r}, which makes its own state: hook_state is for a callable of your own"
        )
