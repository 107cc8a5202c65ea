"""`CommHookDDP`: Lightning's DDP strategy with a communication hook of commhooks."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Optional, Union

from torch.nn.parallel import DistributedDataParallel

from commhooks import HookConfigError, PayloadError
from commhooks.errors import no_such
from commhooks.hook.for_plugins import (
    COMPRESSORS,
    HookConfig,
    HookRequest,
    arguments_in,
    cut_off,
    explains_arguments,
    nothing_saved,
    reason_first,
)
from lightning_commhooks.checkpoint import (
    CHECKPOINT_KEY,
    HookCheckpoint,
    SaveResidual,
    naming,
    saves_alone,
    with_defaults,
)
from lightning_commhooks.hooked_strategy import HookedStrategy, warn
from lightning_commhooks.round_end import put_first
from lightning_commhooks.twins import DDPStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

    HookType = HookConfig | Callable[..., Any] | str | None
else:
    # One member per registered config class, so that LightningCLI accepts and documents it. `str` must be last: before
    # Callable, jsonargparse would pass the path of a function as a string.
    HookType = Union[(None, *(each.Config for each in COMPRESSORS.values()), Callable, str)]


_OF_ANOTHER_HOOK = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")
_FROM_LIGHTNING = {
    "loss_scale": "Lightning passes the scale of its GradScaler itself",
    "total_steps": "the Trainer knows the length of the run",
}
_NOT_FOR_USERS = {"self", "kwargs", "ddp_kwargs", "module", "device_ids"}


class HookedDDP(HookedStrategy, DDPStrategy):
    """`DDPStrategy` with a communication hook, on every device, saved and resumed with the trainer's checkpoints. With
    `hook=None` it is plain DDP, for comparisons: `comm_hook` stays None and checkpoints hold nothing of a hook.

    Args:
        hook, hook_options, hook_state, wrapper, strict, check_every, ranks_per_node: as in `commhooks.attach`.
        save_residual: what checkpoints hold of PowerSGD's error memory; see `CommHookCheckpoint`. Default "mean".
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
        wrapper: Optional[Literal["fp16", "bf16"]] = None,  # noqa: UP045
        save_residual: Optional[SaveResidual] = None,  # noqa: UP045
        strict: Optional[bool] = None,  # noqa: UP045
        check_every: Optional[int] = None,  # noqa: UP045
        ranks_per_node: Union[int, Literal["auto"], None] = None,  # noqa: UP007
        **ddp_kwargs: Any,
    ) -> None:
        check_ddp_arguments(ddp_kwargs, HookedDDP.__init__, super().__init__)
        super().__init__(**ddp_kwargs)
        self._given: dict[str, Any] = {"save_residual": save_residual, "strict": strict}
        self._request = HookRequest.parse(**arguments_in(locals()) | with_defaults(**self._given))
        self._checkpoint_path: str | Path = "the checkpoint"

    # ---- what Lightning calls ----------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        # Before the processes connect: the first moment at which strategy and callbacks are both known, and the last
        # one at which an added callback receives all events. Scripts may call this before `fit`, which calls it again.
        if self.lightning_module is not None:
            self._settle_checkpointing(self.lightning_module.trainer)
        super().setup_environment()

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self._attach(self.model)
        if self._request.off:
            self._comm_hook = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        # The Trainer asks for it first of all that it saves, of weights alone, too.
        module = self.lightning_module
        if module is not None and self.hook_belongs_to(module) and not saves_alone(module.trainer):
            self.end_round(optimizers=True)
        return super().lightning_module_state_dict()

    @reason_first()
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        # Security: by default Lightning 2.6 can execute code in a checkpoint. Default to weights_only=True here; for
        # trusted files `fit` accepts weights_only=False.
        self._checkpoint_path = checkpoint_path
        weights_only = True if weights_only is None else weights_only
        try:
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        except Exception as error:  # torch raises many kinds of exceptions for truncated or foreign files
            if cut := cut_off(checkpoint_path, error):
                raise PayloadError(f"{checkpoint_path} {cut}. Resume from another one") from error
            if isinstance(error, OSError) or not weights_only:  # the message names the file, or code in it has failed
                raise
            foreign = re.search(r"GLOBAL (\S+)", str(error))  # so torch 2.13 names what is no plain type
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise PayloadError(
                f"{checkpoint_path} cannot be read ({f'it holds a {foreign[1]}' if foreign else reason}). Nothing in "
                "it was run; if you trust what made it and it is whole, pass weights_only=False to the Trainer's "
                "method" + (f", or call torch.serialization.add_safe_globals([{foreign[1]}])" if foreign else "")
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
            warn(nothing_saved("the checkpoint", "it was saved without CommHookDDP", hook.name))

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _settle_checkpointing(self, trainer: "pl.Trainer") -> None:
        """Find or add the callback, and combine its options with those of this strategy."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        given = sum(isinstance(callback, HookCheckpoint) for callback in callbacks)
        if given > 1:
            raise HookConfigError(f"{given} CommHookCheckpoint callbacks in one Trainer; give one, or none")
        ours = put_first(trainer, self.checkpoint_callback)
        for name, mine in self._given.items():
            theirs = getattr(ours, name)
            if mine is not None and theirs is not None and mine != theirs:
                raise HookConfigError(
                    f"CommHookDDP({name}={mine!r}) and CommHookCheckpoint({name}={theirs!r}) contradict each other; "
                    f"set {name} in one place"
                )
            if theirs is not None:
                self._request = dataclasses.replace(self._request, **{name: theirs})


def check_ddp_arguments(given: Mapping[str, Any], *takers: Callable[..., None]) -> None:
    """Raise HookConfigError for an argument in `given` that neither DDP nor one of `takers` has, or that sets another
    hook.

    Args:
        takers: the constructors of the strategy and of `DDPStrategy`.
    """
    for name in _OF_ANOTHER_HOOK:
        if given.get(name) is not None:
            raise HookConfigError(
                f"{name}= beside hook=: CommHookDDP attaches its own hook and DDP takes one only. Give your hook as "
                "hook= (with hook_state= and wrapper=); post-local SGD is hook='local_sgd' with start_iter"
            )
    takers = (*takers, DistributedDataParallel.__init__)
    known = {name for each in takers for name in inspect.signature(each).parameters} - _NOT_FOR_USERS
    for name in given:
        if name in _FROM_LIGHTNING:
            raise HookConfigError(f"CommHookDDP has no argument {name!r}: {_FROM_LIGHTNING[name]}; leave it out")
        if name not in known:
            raise no_such(
                "CommHookDDP", "argument", name, sorted(known.difference(_OF_ANOTHER_HOOK, ["mixed_precision"]))
            )
