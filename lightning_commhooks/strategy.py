"""`CommHookDDP`: Lightning's DDP strategy with a communication hook of commhooks."""

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Optional, Union

from torch.nn.parallel import DistributedDataParallel

from commhooks import CommHook, HookConfigError, PayloadError
from commhooks.hook.for_plugins import (
    COMPRESSORS,
    HookConfig,
    HookRequest,
    attach_request,
    cut_off,
    explains_arguments,
    reason_first,
)
from lightning_commhooks.checkpoint import CHECKPOINT_KEY, DEFAULT_SAVE_RESIDUAL, HookCheckpoint, SaveResidual, naming
from lightning_commhooks.ddp_arguments import check_ddp_arguments
from lightning_commhooks.hooked_strategy import HookedStrategy
from lightning_commhooks.messages import warn
from lightning_commhooks.run import loss_scale, steps_left, with_start
from lightning_commhooks.twins import for_the_other_trainer

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    HookType = HookConfig | Callable[..., Any] | str | None
else:
    DDPStrategy = object  # of the Trainer's package: see lightning_pytorch.py and pytorch_lightning.py
    # One member per registered config class, so that LightningCLI accepts and documents it. `str` must be last: before
    # Callable, jsonargparse would pass the path of a function as a string.
    HookType = Union[(None, *(each.Config for each in COMPRESSORS.values()), Callable, str)]


class HookedDDP(HookedStrategy, DDPStrategy):
    """`DDPStrategy` with a communication hook, on every device, saved and resumed with the trainer's checkpoints.

    Args:
        hook: a config object such as `PowerSGD(matrix_approximation_rank=4)`, the name of a hook ("powerSGD",
            "fp16_compress", ...), a path "package.module:function", or a callable
            `(state, bucket) -> torch.futures.Future[torch.Tensor]`. None, "none" or "off": plain DDP without a hook,
            for comparisons; `comm_hook` stays None and checkpoints hold nothing of a hook.
        hook_options: options of a hook that is given by name.
        hook_state: the state of a callable. One with `state_dict` and `load_state_dict` is saved and restored.
        wrapper: let the hook communicate in float16 or bfloat16; for PowerSGD also in 8-bit or 4-bit integers.
        save_residual: what checkpoints hold of PowerSGD's error memory; see `CommHookCheckpoint`. Default "mean".
        strict: whether resuming from a state of another hook or model is an error (the default), or gives what does
            not fit fresh memory and one warning.
        check_every: compare the weights of all ranks before every so many backward passes, and raise on all of them as
            soon as they differ, with the names of the parameters. None: never.
        ranks_per_node: average exactly inside a node and compress between nodes: "auto", or so many consecutive ranks.
            None: compress between all ranks. See `commhooks.attach`.
        ddp_kwargs: everything else goes to `DDPStrategy`, and through it to `DistributedDataParallel`.

    Raises:
        commhooks.HookConfigError: at construction, for an unknown hook, option or keyword (the closest match is
            offered), a value of the wrong type, or an impossible combination.
    """

    checkpoint_callback: ClassVar[type[HookCheckpoint]]
    """`CommHookCheckpoint` of the Trainer's package."""

    @explains_arguments
    def __init__(
        self,
        hook: HookType,
        *,
        hook_options: Optional[dict[str, Any]] = None,  # noqa: UP045
        hook_state: Any = None,
        wrapper: Optional[Literal["fp16", "bf16", "int8", "int4"]] = None,  # noqa: UP045
        save_residual: Optional[SaveResidual] = None,  # noqa: UP045
        strict: Optional[bool] = None,  # noqa: UP045
        check_every: Optional[int] = None,  # noqa: UP045
        ranks_per_node: Union[int, Literal["auto"], None] = None,  # noqa: UP007
        **ddp_kwargs: Any,
    ) -> None:
        check_ddp_arguments(hook, ddp_kwargs, HookedDDP.__init__, super().__init__)
        super().__init__(**ddp_kwargs)
        self._request = HookRequest.parse(
            hook,
            hook_options=hook_options,
            hook_state=hook_state,
            wrapper=wrapper,
            save_residual=DEFAULT_SAVE_RESIDUAL if save_residual is None else save_residual,
            strict=True if strict is None else strict,
            check_every=check_every,
            ranks_per_node=ranks_per_node,
        )
        self._given: dict[str, Any] = {"save_residual": save_residual, "strict": strict}
        # Set when the model is wrapped. Before that, and in pickles, there is only the configuration.
        self._comm_hook: CommHook | None = None
        self._hooked_module: weakref.ref[pl.LightningModule] | None = None
        self._trained_at_wrap: dict[str, bool] = {}
        self._checkpoint_path: str | Path = "the checkpoint"

    # ---- what users call ---------------------------------------------------------------------------------------------

    @property
    def comm_hook(self) -> CommHook | None:
        """The attached hook: `stats()`, `plan()`. None before the model is wrapped, and with `hook=None`; kept when fit
        is over, closed (see `CommHook.close`).

        With the spawn and fork launchers, as in notebooks, it lives in the worker processes and stays None in the main
        one: `hook_stats(trainer)` has its numbers.
        """
        return self._comm_hook

    @property
    def save_residual(self) -> str:
        """Which residuals checkpoints hold: "mean", "per_rank" or "drop"."""
        return self._request.save_residual

    def __repr__(self) -> str:
        return f"{type(self).__name__}(hook={self._request.name!r})" + for_the_other_trainer(self)

    # ---- what Lightning calls ----------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        # Before the processes connect: the first moment at which strategy and callbacks are both known, and the last
        # one at which an added callback receives all events. Scripts may call this before `fit`, which calls it again.
        if self.lightning_module is not None:
            self._settle_checkpointing(self.lightning_module.trainer)
        super().setup_environment()

    def configure_ddp(self) -> None:
        module = self.lightning_module
        assert module is not None
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self._trained_at_wrap = {name: p.requires_grad for name, p in module.named_parameters()}
        self._hooked_module = weakref.ref(module)
        hook = attach_request(
            self.model,
            with_start(self._request, module.trainer),
            loss_scale=loss_scale(module.trainer.precision_plugin, self.root_device),
        )
        self._comm_hook = None if self._request.off else hook

    @reason_first()
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        # Security: by default Lightning 2.6 can execute code in a checkpoint. Default to weights_only=True here; for
        # trusted files `fit` accepts weights_only=False.
        self._checkpoint_path = checkpoint_path
        try:
            return super().load_checkpoint(checkpoint_path, weights_only=True if weights_only is None else weights_only)
        except Exception as error:  # torch raises many kinds of exceptions for truncated or foreign files
            if cut := cut_off(checkpoint_path, error):
                raise PayloadError(f"{checkpoint_path} cannot be read: {cut}. Resume from another one") from error
            if isinstance(error, OSError):  # its message names the file
                raise
            reason = (str(error).splitlines() or [""])[0]
            raise PayloadError(
                f"{checkpoint_path} cannot be read ({type(error).__name__}: {reason}). Nothing in it was run; if you "
                "trust what made it and it is whole, pass weights_only=False to the Trainer's method"
            ) from error

    @reason_first()
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        hook = self._comm_hook
        take_over = None
        if hook is not None and CHECKPOINT_KEY in checkpoint:
            # Check everything before the optimizers load their states.
            with naming(self._checkpoint_path):
                take_over = hook.prepare_load(checkpoint[CHECKPOINT_KEY], self._request.strict)
        super().load_optimizer_state_dict(checkpoint)
        if take_over is not None:
            take_over()
        elif hook is not None:
            warn(
                f"the checkpoint holds no state of a communication hook (it was saved without CommHookDDP): hook "
                f"{hook.name!r} begins with fresh memory"
            )

    def teardown(self) -> None:
        super().teardown()
        if self._comm_hook is not None:
            self._comm_hook.close()

    def __getstate__(self) -> dict[str, Any]:
        # Pickles (of the spawn launcher) and copies contain the configuration, never the hook of a wrapped model.
        state = super().__getstate__()
        return {**state, "_comm_hook": None, "_hooked_module": None, "_trained_at_wrap": {}}

    # ---- what CommHookCheckpoint calls -------------------------------------------------------------------------------

    def hook_belongs_to(self, module: "pl.LightningModule") -> bool:
        """Whether the hook was attached for this module, not for a module trained earlier."""
        return self._hooked_module is not None and self._hooked_module() is module

    def parameters_unfrozen_after_wrap(self) -> list[str]:
        """Names of parameters that require a gradient now and did not when the model was wrapped."""
        module = self.lightning_module
        if self._comm_hook is None or module is None:
            return []
        return [
            name
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and not self._trained_at_wrap.get(name, False)
        ]

    def warn_if_never_reached(self, trainer: "pl.Trainer") -> None:
        """Log a warning if this run ends before the hook begins to compress."""
        hook, left, config = self._comm_hook, steps_left(trainer), self._request.config
        if hook is None or config is None or config.start_option is None or left is None:
            return
        start, step = hook.options[config.start_option], hook.stats()["step"]
        if start < step + left:
            return
        about = "" if trainer.lightning_module.automatic_optimization else "about "
        warn(
            f"{hook.name} begins to compress after {start} steps, but this run ends after {about}{step + left}: "
            f"nothing will be compressed. Set {config.start_option} to a smaller number, or to a fraction of the run."
        )

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _settle_checkpointing(self, trainer: "pl.Trainer") -> None:
        """Find or add the callback, and combine its options with those of this strategy."""
        # `trainer.callbacks` is an ordinary list; Lightning itself appends to it.
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        ours = [callback for callback in callbacks if isinstance(callback, HookCheckpoint)]
        if len(ours) > 1:
            raise HookConfigError(f"{len(ours)} CommHookCheckpoint callbacks in one Trainer; give one, or none")
        if not ours:
            ours = [self.checkpoint_callback()]
            callbacks.append(ours[0])
        for name, mine in self._given.items():
            theirs = getattr(ours[0], name)
            if mine is not None and theirs is not None and mine != theirs:
                raise HookConfigError(
                    f"CommHookDDP({name}={mine!r}) and CommHookCheckpoint({name}={theirs!r}) contradict each other; "
                    f"set {name} in one place"
                )
            if theirs is not None:
                self._request = dataclasses.replace(self._request, **{name: theirs})
