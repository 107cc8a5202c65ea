"""`CommHookKwargs`, Accelerate's handler of DDP arguments with a communication hook."""

import dataclasses
import sys
import weakref

import torch
from accelerate import Accelerator, DistributedType
from torch.nn.parallel import DistributedDataParallel

from accelerate_commhooks.arguments import HookArguments
from accelerate_commhooks.hooked_models import HookedModels
from accelerate_commhooks.prepare import check_takes_hook, override_prepare
from accelerate_commhooks.saving import any_model_has_hook, ensure_hook_saver
from accelerate_commhooks.unattached import CALL_ATTACH, call_before_step, raise_or_warn, warn_alone
from commhooks import CommHook, HookConfigError, HookRunError
from commhooks.hook.plugin_api import PREFIX, Meter


class CommHookKwargs(HookArguments):
    """Attaches a communication hook to the models that Accelerate prepares.

    It takes all arguments of `DistributedDataParallelKwargs`, too.

        Accelerator(kwargs_handlers=[CommHookKwargs(hook="powerSGD", bucket_cap_mb=50)])

    Every model that the accelerator wraps in DDP gets a hook with its own learned state, which
    `save_state` and `load_state` include. In two cases call `attach` before `accelerator.prepare`,
    because Accelerate then does not ask its handlers: with FSDP2 and
    `ParallelismConfig(dp_replicate_size=R, dp_shard_size=S)`, where each of the `R` replicas is
    sharded over `S` ranks and the hook averages between the replicas; and with `members`. If this
    was forgotten, the first optimizer step raises AttachError. In all other cases (one process,
    DeepSpeed, evaluation mode) there is no hook; see `is_attached`.

    Without `hook` the settings come from `accelerate-commhooks launch`, or from the YAML file in
    the environment variable ACCELERATE_COMM_HOOK_CONFIG. Arguments given here override those
    settings. The stock arguments `comm_hook`, `comm_wrapper` and `comm_state_option` select hooks
    of commhooks by torch's names.

    Args:
        hook: a config object such as `PowerSGD(matrix_approximation_rank=4)`, the name of a hook
            ("powerSGD", "fp16_compress", ...), a path "package.module:function", or a callable
            `(state, bucket) -> torch.futures.Future[torch.Tensor]`. An explicit None, "none" or
            "off": plain DDP, for comparisons.
        save_residual: which residuals `save_state` saves. "per_rank" (the default): every rank's
            own residuals, in a separate file, without communication. "mean": their mean, in the
            shared file; all ranks must call `save_state`. "drop": none. With FSDP2 the default is
            "mean", over the replicas, and "per_rank" is an error.
        hook_options, hook_state, wrapper, strict, total_steps, check_every, ranks_per_node,
            members: as in `commhooks.attach`.
        shards: as in `commhooks.attach`, for FSDP2. Without `hook` it needs no `ParallelismConfig`.

    Raises:
        commhooks.HookConfigError: at construction, for an unknown hook or option, a value of the
            wrong type, or an invalid combination.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._models = HookedModels()
        self._meter = Meter()
        self._warned_alone = False
        self._attached_to: weakref.WeakSet[Accelerator] = weakref.WeakSet()
        call_before_step(self._check_attached)

    @property
    def attached(self) -> CommHook | None:
        """The hook of the latest prepared model that still exists; None without one."""
        return next(reversed(self.attached_hooks), None)

    @property
    def attached_hooks(self) -> list[CommHook]:
        """The hooks of all models that this handler has prepared and that still exist, in order."""
        return self._models.hooks

    def is_attached(self, model: torch.nn.Module) -> bool:
        """Return whether `model`, from `prepare` or the module inside it, has a hook of this."""
        return self._models.has(model)

    def log(self, accelerator: Accelerator, step: int | None = None) -> None:
        """Log the metrics of the hooks with the accelerator's trackers, as `accelerator.log` does.

            if step % 50 == 0:
                handler.log(accelerator, step=step)

        docs/working.md explains the metrics; names begin with `commhooks/1/` for the second of
        several models. Means are over the steps since the previous call. Without a hook nothing is
        logged. Call this between `optimizer.step()` and `optimizer.zero_grad()`, or the two metrics
        that read gradients are omitted. It does not communicate: all ranks may call it, or only the
        main process.

        Args:
            accelerator: the accelerator with the trackers (`Accelerator(log_with=...)` with
                `init_trackers`).
            step: as for `accelerator.log`.

        Raises:
            HookRunError: the accelerator has no trackers.
        """
        if not accelerator.is_main_process:
            return  # only the main process has trackers (Accelerate 1.15)
        if accelerator.distributed_type is DistributedType.NO:
            self.warn_alone()
        _check_trackers(accelerator)
        values: dict[str, float] = {}
        for number, hook in enumerate(self.attached_hooks):
            values |= self._meter.read(hook, prefix=f"{PREFIX}/{number}" if number else PREFIX)
        if values:
            accelerator.log(values, step=step)

    def attach(self, accelerator: Accelerator) -> "CommHookKwargs":
        """Use this handler for the models that `accelerator` prepares from now on. Returns the
        handler.

            accelerator = Accelerator(fsdp_plugin=..., parallelism_config=...)
            handler.attach(accelerator)
            model, optimizer = accelerator.prepare(model, optimizer)

        With DDP, `Accelerator(kwargs_handlers=[handler])` does the same. With FSDP2, and with
        `members`, only this method attaches the hook: it overrides `accelerator.prepare`, of this
        one object, because Accelerate gives a handler neither models that it shards nor those of a
        single process. It may be called beside `kwargs_handlers`.

        Raises:
            HookConfigError: the accelerator has DDP arguments of its own, or neither wraps models
                in DDP nor shards replicas of them (DeepSpeed, FSDP1, FSDP2 without
                `ParallelismConfig`).
        """
        if not isinstance(accelerator.ddp_handler, CommHookKwargs | None):
            raise HookConfigError(
                "this accelerator has a DistributedDataParallelKwargs already, and takes only one:"
                " pass its arguments to CommHookKwargs(...) instead"
            )
        kind = accelerator.distributed_type
        if not (kind is DistributedType.FSDP and self.off):
            check_takes_hook(accelerator, shards_alone=self.request.shards_alone)
        accelerator.ddp_handler = self
        self._attached_to.add(accelerator)
        ensure_hook_saver(accelerator)
        if kind is DistributedType.FSDP or self.members is not None:
            override_prepare(accelerator, self)
        elif kind is DistributedType.NO:
            self.warn_alone()
        return self

    def warn_alone(self) -> None:
        if not self._warned_alone and not self.off:
            self._warned_alone = True
            warn_alone(self.request)

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Attach a hook to a model that has just been wrapped.

        `Accelerator.prepare_model` calls this on every rank.
        """
        accelerator = _calling_accelerator()  # Accelerate 1.15 passes the model alone
        if self.members is not None and accelerator not in (None, *self._attached_to):
            raise HookConfigError(f"members={self.members!r} beside DDP: {CALL_ATTACH}")
        self.attach_model(model, accelerator)

    def attach_model(self, model: torch.nn.Module, accelerator: Accelerator | None) -> None:
        """Attach a hook to a prepared model. Every rank must call this."""
        request = self.request
        shards = accelerator is not None and accelerator.distributed_type is DistributedType.FSDP
        if shards and "save_residual" not in self.given:
            request = dataclasses.replace(request, save_residual="mean")
        self._models.attach(
            model, request, accelerator, request.total_steps or self.run_length, self._settings
        )

    def _check_attached(self) -> bool:
        done = self._models.were_attached or self._warned_alone
        if not (done or self.off or any_model_has_hook()):
            raise_or_warn(self.request)
            self._warned_alone = True
        return True


def _calling_accelerator() -> Accelerator | None:
    frame = sys._getframe(2)
    while frame is not None and not isinstance(frame.f_locals.get("self"), Accelerator):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals["self"]


def _check_trackers(accelerator: Accelerator) -> None:
    if not accelerator.trackers:
        tracker = "give Accelerator(log_with=...) an installed tracker, and "
        missing = "" if accelerator.log_with else tracker
        raise HookRunError(
            f"CommHookKwargs.log: this accelerator has no trackers; {missing}call"
            " accelerator.init_trackers(...) first"
        )
