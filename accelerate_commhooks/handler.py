"""`CommHookKwargs`, Accelerate's handler of DDP arguments with a communication hook."""

import dataclasses
import os
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType
from accelerate.utils import DDPCommunicationHookType
from torch.nn.parallel import DistributedDataParallel

from accelerate_commhooks.prepare import check_takes_hook, override_prepare, replicas_of, warn_at_first_prepare
from accelerate_commhooks.saving import HookedModel, ensure_hook_saver, unwrapped
from accelerate_commhooks.yaml_settings import DDP_FIELDS, LINE_TO_ADD, STOCK_HOOK_FIELDS, VARIABLE, Settings
from commhooks import AttachError, CommHook, HookConfigError, HookRunError
from commhooks.errors import logger_of, no_such, print_error_on_rank_zero
from commhooks.hook.plugin_api import ARGUMENTS, PREFIX, HookRequest, Meter, ScaleOf, attach_request, check_choice

logger = logger_of(__name__)

_NO = DDPCommunicationHookType.NO


@dataclass(eq=False, repr=False)
class CommHookKwargs(DistributedDataParallelKwargs):
    """Attaches a communication hook to the models that Accelerate prepares, and takes all arguments of
    `DistributedDataParallelKwargs`.

        Accelerator(kwargs_handlers=[CommHookKwargs(hook="powerSGD", bucket_cap_mb=50)])

    Every model that the accelerator wraps in DDP gets a hook with its own learned state, which `save_state` and
    `load_state` include. So does a model that it shards by FSDP2 with `ParallelismConfig(dp_replicate_size=R,
    dp_shard_size=S)`: each of the `R` replicas is sharded over `S` ranks, and the hook averages between the replicas.
    In all other cases (one process, DeepSpeed, evaluation mode) there is no hook; see `is_attached`.

    Without `hook` the settings come from `accelerate-commhooks launch`, or from the YAML file in the environment
    variable ACCELERATE_COMM_HOOK_CONFIG. Arguments given here override those settings. The stock arguments `comm_hook`,
    `comm_wrapper` and `comm_state_option` select hooks of commhooks by torch's names.

    Args:
        hook: a config object such as `PowerSGD(matrix_approximation_rank=4)`, the name of a hook ("powerSGD",
            "fp16_compress", ...), a path "package.module:function", or a callable
            `(state, bucket) -> torch.futures.Future[torch.Tensor]`. An explicit None, "none" or "off": plain DDP, for
            comparisons.
        save_residual: which residuals `save_state` saves. "per_rank" (the default): every rank's own residuals, in a
            separate file, without communication. "mean": their mean, in the shared file; all ranks must call
            `save_state`. "drop": none. With FSDP2 the default is "mean", over the replicas, and "per_rank" is an error.
        hook_options, hook_state, wrapper, strict, total_steps, check_every, ranks_per_node, members: as in
            `commhooks.attach`.

    Raises:
        commhooks.HookConfigError: at construction, for an unknown hook or option, a value of the wrong type, or an
            invalid combination. In `prepare`, with FSDP1, and with FSDP2 without `ParallelismConfig`.
    """

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

    @print_error_on_rank_zero()
    def __new__(cls, *args: Any, **kwargs: Any) -> "CommHookKwargs":
        # Arguments override the environment even if they equal the default. __init__ cannot tell which were given.
        handler = super().__new__(cls)
        names = [f.name for f in dataclasses.fields(cls)]
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
        """DDP arguments of transformers' Trainer; used for arguments that the user has not given."""
        self._hooked: list[HookedModel] = []
        self._meter = Meter()
        self._settings: Settings | None = None
        self._warned_alone = False
        asks = self.hook is not None or "hook" in self.given or self._stock_requests()
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
    def from_config(cls, path: str | Path | None = None, *, overrides: Iterable[str] = ()) -> "CommHookKwargs":
        """Make a handler with the settings of a YAML file.

        Args:
            path: a file of settings, or a configuration of Accelerate with a section `comm_hook_config`. None: the
                settings from `accelerate-commhooks launch` or ACCELERATE_COMM_HOOK_CONFIG.
            overrides: replace settings of the file, e.g. `["hook_options.matrix_approximation_rank=8"]`.

        Raises:
            HookConfigError: no file, or invalid settings; the message names the file and the setting.
        """
        if isinstance(overrides, str):
            raise HookConfigError(f"overrides={overrides!r} is a str; expected a list of str 'key=value'")
        overrides = list(overrides)
        given = Settings.from_environment(overrides) if path is None else Settings.read(path, overrides)
        if given is None:
            raise HookConfigError(
                f"CommHookKwargs.from_config() without a path, and {VARIABLE} is not set. Pass a path, set the "
                "environment variable to one, or start the script with `accelerate-commhooks launch`"
            )
        with given.errors_name_source():
            handler = cls(**given.arguments())
        handler._use(given)
        return handler

    @property
    def attached(self) -> CommHook | None:
        """The hook, with `stats()` and `plan()`, of the latest prepared model that still exists; None without one."""
        return next(reversed(self.attached_hooks), None)

    @property
    def attached_hooks(self) -> list[CommHook]:
        """The hooks of all existing models that were prepared with this handler, in order of preparation."""
        return [hook for hooked in self._hooked if (hook := hooked.hook) is not None]

    @property
    def request(self) -> HookRequest:
        """The checked values of the fields. They are read anew each time, because users may change a handler's
        fields."""
        if not isinstance(self.dim, int):
            raise HookConfigError(
                f"CommHookKwargs({self.dim!r}): the first positional argument is DDP's `dim`; "
                f"write CommHookKwargs(hook={self.dim!r})"
            )
        given = {name: getattr(self, name) for name in ARGUMENTS}
        if stock := self._stock_requests():
            if any(given[name] is not None for name in ("hook", "hook_options", "wrapper")):
                ours = "hook" if self.hook is not None else "hook_options or wrapper"
                raise HookConfigError(
                    f"{' and '.join(stock)} together with {ours}=: both set a communication hook, and DDP takes only "
                    "one. Keep hook= (with hook_options= and wrapper=)"
                )
            given |= self._translated()
        elif self.hook is None and "hook" not in self.given:
            raise HookConfigError(
                "CommHookKwargs needs hook=, such as 'powerSGD', or settings from `accelerate-commhooks launch` or a "
                f"YAML file named in {VARIABLE}. hook=None is DDP without a hook"
            )
        return HookRequest.parse(**given)

    @property
    def off(self) -> bool:
        return self.request.off

    def is_attached(self, model: torch.nn.Module) -> bool:
        """Return whether `model`, which is from `prepare` or the module inside it, has a hook of this handler."""
        return any(hooked.is_of(model) for hooked in self._hooked)

    def log(self, accelerator: Accelerator, step: int | None = None) -> None:
        """Log the metrics of the hooks with the accelerator's trackers, as `accelerator.log` does.

            if step % 50 == 0:
                handler.log(accelerator, step=step)

        docs/working.md explains the metrics; names begin with `commhooks/1/` for the second of several models. Means
        are over the steps since the previous call. Without a hook nothing is logged. Call this between
        `optimizer.step()` and `optimizer.zero_grad()`, or the two metrics that read gradients are omitted. It does not
        communicate: all ranks may call it, or only the main process.

        Args:
            accelerator: the accelerator with the trackers (`Accelerator(log_with=...)` with `init_trackers`).
            step: as for `accelerator.log`.

        Raises:
            HookRunError: the accelerator has no trackers.
        """
        if not accelerator.is_main_process:
            return  # only the main process has trackers (Accelerate 1.15)
        if accelerator.distributed_type is DistributedType.NO:
            self.warn_alone()
        if not accelerator.trackers:
            missing = "" if accelerator.log_with else "give Accelerator(log_with=...) an installed tracker, and "
            raise HookRunError(
                f"CommHookKwargs.log: this accelerator has no trackers; {missing}call accelerator.init_trackers(...) "
                "first"
            )
        values: dict[str, float] = {}
        for number, hook in enumerate(self.attached_hooks):
            prefix = f"{PREFIX}/{number}" if number else PREFIX
            values |= self._meter.read(hook, prefix=prefix)
        if values:
            accelerator.log(values, step=step)

    def attach(self, accelerator: Accelerator) -> "CommHookKwargs":
        """Use this handler for the models that an existing accelerator prepares from now on. Returns the handler.

        Raises:
            HookConfigError: the accelerator has DDP arguments of its own, or neither wraps models in DDP nor shards
                replicas of them.
        """
        if not isinstance(accelerator.ddp_handler, CommHookKwargs | None):
            raise HookConfigError(
                "this accelerator has a DistributedDataParallelKwargs already, and takes only one: pass its arguments "
                "to CommHookKwargs(...) instead"
            )
        shards = accelerator.distributed_type is DistributedType.FSDP
        if not (shards and self.off):
            check_takes_hook(accelerator)
        accelerator.ddp_handler = self
        ensure_hook_saver(accelerator)
        if shards or self.members is not None:
            override_prepare(accelerator, self)
        if accelerator.distributed_type is DistributedType.NO and self.members is None:
            self.warn_alone()
        return self

    def warn_alone(self) -> None:
        if not self._warned_alone and not self.off:
            self._warned_alone = True
            logger.warning(
                "%s: there is one rank, so nothing is sent. Accelerate does not wrap its model in DDP: there is no "
                "hook, and the gradients are exact. %s",
                self.request.name,
                f"The launcher has started {os.environ['WORLD_SIZE']} processes, and each trains alone: on CPUs "
                "pass Accelerator(cpu=True), or TrainingArguments(use_cpu=True)."
                if int(os.environ.get("WORLD_SIZE") or 1) > 1
                else "Start the script with torchrun or accelerate launch for several ranks.",
            )

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Accelerate 1.15 looks up handlers by their exact class (`handler_class_to_attr[handler.__class__]`), and a
        # subclass would raise KeyError. `type()` and `isinstance` still use the real class.
        # Under FSDP and with one process Accelerator.__init__ never calls the handler again, so this is the only chance
        # to override `prepare`. It has set the environment variable before.
        shards = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        accelerator = _calling_accelerator()
        if accelerator is not None and (shards or self.members is not None):
            override_prepare(accelerator, self)
        elif accelerator is not None and "state" not in vars(accelerator):  # in its constructor
            warn_at_first_prepare(accelerator, self)
        return DistributedDataParallelKwargs

    def to_dict(self) -> dict[str, Any]:
        own = {f.name: getattr(self, f.name) for f in DDP_FIELDS}
        return own | {name: value for name, value in self.ddp_defaults.items() if not self.has_set(name)}

    def has_set(self, name: str) -> bool:
        return name in self.given or getattr(self, name) != getattr(type(self), name)

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Attach a hook to a model that has just been wrapped. `Accelerator.prepare_model` calls this on every rank."""
        # Accelerate 1.15 passes the model alone.
        self._attach(model, self.request, _calling_accelerator())

    def attach_alone(self, accelerator: Accelerator, model: torch.nn.Module) -> None:
        """Attach a hook, in place of an earlier one, to a model that Accelerate does not wrap, with one process per
        machine."""
        self._detach_earlier(model)
        gradient_state = accelerator.gradient_state
        self._attach(unwrapped(model), self.request, accelerator, accumulates=lambda: not gradient_state.sync_gradients)

    def attach_to_replica(self, accelerator: Accelerator, model: torch.nn.Module) -> None:
        """Attach a hook to a model that `accelerator` has just sharded by FSDP2 within each replica. It replaces the
        hook of an earlier `prepare`. Every rank must call this."""
        request = self.request
        if request.off:
            ensure_hook_saver(accelerator)
            if self._settings is not None:
                self._settings.message("")
            return
        if request.save_residual == "per_rank":
            if "save_residual" in self.given:
                raise HookConfigError(
                    "save_residual='per_rank' with a model sharded by FSDP2; expected 'mean' (the default), the mean "
                    "over the replicas, or 'drop'"
                )
            request = dataclasses.replace(request, save_residual="mean")
        self._detach_earlier(model)
        self._attach(model, request, accelerator, replicate_group=replicas_of(accelerator))

    def _detach_earlier(self, model: torch.nn.Module) -> None:
        for earlier in [each.hook for each in self._hooked if each.is_of(model)]:
            if earlier is not None:
                earlier.detach()

    def __repr__(self) -> str:
        names = [f.name for f in dataclasses.fields(self) if f.name in self.given]
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and _values(self) == _values(other)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles and copies contain the configuration, never a hook.
        return _rebuild, (type(self), _values(self)), {"_settings": self._settings, "given": self.given}

    def _stock_requests(self) -> list[str]:
        return [name for name in STOCK_HOOK_FIELDS if getattr(self, name) not in (_NO, "no", None, {})]

    def _translated(self) -> dict[str, Any]:
        def chosen(name: str, allowed: Iterable[DDPCommunicationHookType]) -> str | None:
            value = getattr(self, name)
            text = getattr(value, "value", value)
            if text is not None:
                check_choice(name, text, tuple(choice.value for choice in allowed))
            return None if text == _NO.value else text

        hook = chosen("comm_hook", DDPCommunicationHookType)
        wrapper = chosen("comm_wrapper", (_NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16))
        if hook is None:
            given = "comm_wrapper" if wrapper is not None else "comm_state_option"
            raise HookConfigError(f"{given} without comm_hook: no communication hook is set")
        return {"hook": hook, "hook_options": self.comm_state_option or None, "wrapper": wrapper}

    def _use(self, settings: Settings) -> None:
        self._settings = settings
        settings.message(
            f"the hook {settings.values['hook']!r} of {settings.source} was attached to no model. {LINE_TO_ADD}",
            first=True,
        )

    def _attach(
        self,
        model: torch.nn.Module,
        request: HookRequest,
        accelerator: Accelerator | None,
        **more: Any,
    ) -> None:
        self._hooked = [each for each in self._hooked if each.hook is not None]
        if self._hooked and callable(getattr(request.hook_state, "state_dict", None)):
            raise AttachError(
                f"hook_state ({type(request.hook_state).__name__}) is one object, and is used by another model. "
                "Give each model a handler of its own, or make states by a factory: "
                "commhooks.register_hook(name, factory)"
            )
        scale = message = saver = None
        if accelerator is not None:
            weak = weakref.ref(accelerator)
            # The scaler may be set later, so it is looked up at each call.
            scale = ScaleOf(lambda: getattr(weak(), "scaler", None), accelerator.device)
            saver = ensure_hook_saver(accelerator)
        if self._settings is not None:
            message = self._settings.message
        hook = attach_request(
            model,
            request,
            total_steps=request.total_steps or self.run_length,
            loss_scale=scale,
            on_unused=message,
            **more,
        )
        if message is not None:
            message("")
        if request.off:
            return
        hooked = HookedModel(model, hook, request.strict, request.save_residual)
        self._hooked.append(hooked)
        if saver is not None:
            saver.add(model, hooked)
        else:
            logger.warning("hook %r was attached without an accelerator: no save_state includes its state.", hook.name)


def _calling_accelerator() -> Accelerator | None:
    frame = sys._getframe(2)
    while frame is not None and not issubclass(type(frame.f_locals.get("self")), Accelerator):  # `__class__` calls this
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals["self"]


def _values(handler: Any) -> dict[str, Any]:
    return {f.name: getattr(handler, f.name) for f in dataclasses.fields(handler)}


def _rebuild(cls: type[CommHookKwargs], values: dict[str, Any]) -> CommHookKwargs:
    return cls(**values)
