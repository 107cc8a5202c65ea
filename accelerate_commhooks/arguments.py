"""The arguments of `CommHookKwargs`: from Python, from a file of settings, or Accelerate's own."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from accelerate import DistributedDataParallelKwargs

from accelerate_commhooks import stock_hooks
from accelerate_commhooks.yaml_settings import DDP_FIELDS, VARIABLE, Settings
from commhooks import HookConfigError
from commhooks.errors import no_such, print_error_on_rank_zero
from commhooks.hook.plugin_api import ARGUMENTS, HookRequest

AnyArguments = TypeVar("AnyArguments", bound="HookArguments")


@dataclass(eq=False, repr=False)
class HookArguments(DistributedDataParallelKwargs):
    """Base of `CommHookKwargs`, which explains the arguments. It attaches nothing."""

    hook: Any = field(default=None, kw_only=True)
    hook_options: dict[str, Any] | None = field(default=None, kw_only=True)
    hook_state: Any = field(default=None, kw_only=True)
    wrapper: str | None = field(default=None, kw_only=True)
    save_residual: str = field(default="per_rank", kw_only=True)
    strict: bool = field(default=True, kw_only=True)
    total_steps: int | None = field(default=None, kw_only=True)
    check_every: int | None = field(default=None, kw_only=True)
    ranks_per_node: int | str | None = field(default=None, kw_only=True)
    members: Any = field(default=None, kw_only=True)
    shards: Any = field(default=None, kw_only=True)

    @print_error_on_rank_zero()
    def __new__(cls: type[AnyArguments], *args: Any, **kwargs: Any) -> AnyArguments:
        # Arguments override the environment even if they equal the default. __init__ cannot tell
        # which were given.
        handler = super().__new__(cls)
        names = [option.name for option in dataclasses.fields(cls)]
        for name in kwargs:
            if name not in names:
                raise no_such("CommHookKwargs", "argument", name, names)
        handler.given = frozenset(names[: len(args)]) | frozenset(kwargs)
        return handler

    @print_error_on_rank_zero()
    def __post_init__(self) -> None:
        self.given: frozenset[str]
        """Names of the arguments that the user has given, in Python, YAML or the environment."""
        self.run_length: int | None = None
        """Length of the run, set by transformers' Trainer; used if `total_steps` is None."""
        self.ddp_defaults: dict[str, Any] = {}
        """DDP arguments of transformers' Trainer; used for arguments that the user has not given.
        """
        self._settings: Settings | None = None
        said = self.hook is not None or self.shards is not None or "hook" in self.given
        asks = said or stock_hooks.given_in(self)
        settings = None if asks else Settings.from_environment()
        if settings is not None:
            settings.check()
            with settings.errors_name_source():
                outside = settings.arguments()
            for name in outside.keys() - self.given:
                setattr(self, name, outside[name])
            self.given |= outside.keys()
        request = self.request
        if request.config is not None:
            request.config.resolved(request.total_steps)  # a fraction needs total_steps
        if settings is not None:
            self._use(settings)

    @classmethod
    def from_config(
        cls: type[AnyArguments], path: str | Path | None = None, *, overrides: Iterable[str] = ()
    ) -> AnyArguments:
        """Make a handler with the settings of a YAML file.

        Args:
            path: a file of settings, or a configuration of Accelerate with a section
                `comm_hook_config`. None: the settings from `accelerate-commhooks launch` or
                ACCELERATE_COMM_HOOK_CONFIG.
            overrides: replace settings of the file, e.g.
                `["hook_options.matrix_approximation_rank=8"]`.

        Raises:
            HookConfigError: no file, or invalid settings; the message names the file and the
                setting.
        """
        settings = Settings.find(path, overrides)
        with settings.errors_name_source():
            handler = cls(**settings.arguments())
        handler._use(settings)
        return handler

    @property
    def request(self) -> HookRequest:
        """The checked values of the fields, which users may change."""
        if not isinstance(self.dim, int):
            raise HookConfigError(
                f"CommHookKwargs({self.dim!r}): the first positional argument is DDP's `dim`; "
                f"write CommHookKwargs(hook={self.dim!r})"
            )
        stock = stock_hooks.translated(self)
        said = self.hook is not None or self.shards is not None or "hook" in self.given
        if not stock and not said:
            raise HookConfigError(
                "CommHookKwargs needs hook=, such as 'powerSGD', or settings from"
                f" `accelerate-commhooks launch` or a YAML file named in {VARIABLE}. hook=None is"
                " DDP without a hook"
            )
        return HookRequest.parse(**{name: getattr(self, name) for name in ARGUMENTS} | stock)

    @property
    def off(self) -> bool:
        return self.request.off

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Accelerate 1.15 looks up handlers by their exact class
        # (`handler_class_to_attr[handler.__class__]`), and a subclass would raise KeyError.
        # `type()` and `isinstance` still use the real class.
        return DistributedDataParallelKwargs

    def to_dict(self) -> dict[str, Any]:
        arguments = {option.name: getattr(self, option.name) for option in DDP_FIELDS}
        for name, default in self.ddp_defaults.items():
            if not self.has_set(name):
                arguments[name] = default
        return arguments

    def has_set(self, name: str) -> bool:
        return name in self.given or getattr(self, name) != getattr(type(self), name)

    def __repr__(self) -> str:
        given = {name: value for name, value in _values(self).items() if name in self.given}
        values = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"{type(self).__qualname__}({values})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and _values(self) == _values(other)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles and copies contain the configuration, never a hook.
        return (
            _rebuild,
            (type(self), _values(self)),
            {"_settings": self._settings, "given": self.given},
        )

    def _use(self, settings: Settings) -> None:
        self._settings = settings
        settings.message("" if self.off else settings.attached_to_no_model, first=True)


def _values(handler: Any) -> dict[str, Any]:
    return {option.name: getattr(handler, option.name) for option in dataclasses.fields(handler)}


def _rebuild(cls: type[HookArguments], values: dict[str, Any]) -> HookArguments:
    return cls(**values)
