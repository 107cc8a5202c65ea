"""What `CommHookDDP` adds to Fabric's DDP strategy: a hook for every model that is set up."""

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commhooks import CommHook, HookConfigError, PayloadError, Torchft
from commhooks.hook.plugin_api import (
    HookRequest,
    arguments_in,
    attach_request,
    cut_off,
    nothing_saved,
    print_error_on_rank_zero,
    suggests_arguments,
)
from lightning_commhooks.checkpoint import (
    CHECKPOINT_KEY,
    DEFAULT_SAVE_RESIDUAL,
    SaveResidual,
    errors_name_checkpoint,
    in_signal_handler,
)
from lightning_commhooks.strategy import HookType, check_ddp_arguments, loss_scale, warn

if TYPE_CHECKING:
    from lightning.fabric.strategies import DDPStrategy
else:
    DDPStrategy = object  # see strategy.py


class HookedFabricDDP(DDPStrategy):
    """The mixin of `CommHookDDP` in `fabric.py` and `lightning_fabric.py`."""

    @suggests_arguments
    def __init__(
        self,
        hook: HookType,
        *,
        hook_options: Mapping[str, Any] | None = None,
        hook_state: Any = None,
        wrapper: str | None = None,
        save_residual: SaveResidual = DEFAULT_SAVE_RESIDUAL,
        strict: bool = True,
        total_steps: int | None = None,
        check_every: int | None = None,
        ranks_per_node: int | Literal["auto"] | None = None,
        members: Torchft | Literal["torchft"] | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        check_ddp_arguments(ddp_kwargs, HookedFabricDDP.__init__, super().__init__)
        super().__init__(**ddp_kwargs)
        self._request = HookRequest.parse(**arguments_in(locals()))
        self._hooks: weakref.WeakKeyDictionary[DistributedDataParallel, CommHook] = (
            weakref.WeakKeyDictionary()
        )
        self._warned_about_saving = False

    # ---- what users call
    # ---------------------------------------------------------------------------------------------

    def hook_of(self, model: nn.Module) -> CommHook | None:
        """Return the hook of `model`, from `fabric.setup` or the module inside it, or None."""
        inner = getattr(model, "module", model)
        for ddp, hook in self._hooks.items():
            if ddp in (model, inner) or ddp.module is inner:
                return hook
        return None

    @property
    def comm_hook(self) -> CommHook | None:
        """The hook of the model that was set up last and still exists."""
        return next(reversed(list(self._hooks.values())), None)

    def __repr__(self) -> str:
        # With the module's name, because a Trainer that is given this strategy shows only the
        # `repr` in its error.
        return f"{type(self).__module__}.{type(self).__name__}(hook={self._request.name!r})"

    # ---- what Fabric calls
    # -------------------------------------------------------------------------------------------

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        if callable(getattr(self._request.hook_state, "state_dict", None)) and self._hooks:
            raise HookConfigError(
                f"hook_state ({type(self._request.hook_state).__name__}) is one object, and is used"
                " by another model already. Make a state for each model by a factory:"
                " commhooks.register_hook(name, factory)"
            )
        model = super().setup_module(module)
        scale = loss_scale(self.precision, self.root_device)
        hook = attach_request(model, self._request, loss_scale=scale)
        if not self._request.off:
            self._hooks[model] = hook
        return model

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        if CHECKPOINT_KEY in state:
            raise HookConfigError(
                f"{CHECKPOINT_KEY!r} in the state: this key holds the states of the hooks"
            )
        hooks = self._hooks_in(state)
        joint = not in_signal_handler()
        if joint:
            for hook in self._hooks.values():
                hook.synchronize(optimizers=True)
        if hooks:
            saved = {
                name: hook.state_dict(gather=True, joint=joint) for name, hook in hooks.items()
            }
            state = {**state, CHECKPOINT_KEY: saved}
        elif self._hooks and not self._warned_about_saving:
            self._warned_about_saving = True
            warn(
                "this checkpoint holds no state of a communication hook, because none of the models"
                " is in it: give fabric.save the model itself, {'model': model}, not"
                " model.state_dict()"
            )
        super().save_checkpoint(
            path=path, state=state, storage_options=storage_options, filter=filter
        )

    @print_error_on_rank_zero()
    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        # Fabric 2.6 would execute code in a checkpoint from the web by default.
        weights_only = True if weights_only is None else weights_only
        try:
            rest = super().load_checkpoint(
                path=path, state=state, strict=strict, weights_only=weights_only
            )
        except Exception as error:  # torch raises many kinds of exceptions for truncated files
            if cut := cut_off(path, error):
                raise PayloadError(f"{path} {cut}. Load another checkpoint") from error
            raise
        if isinstance(state, dict) and state:
            with errors_name_checkpoint(path):
                saved = rest.pop(CHECKPOINT_KEY, {})
                self._load_hooks(state, saved, strict=strict and self._request.strict)
        elif not state and self._hooks and CHECKPOINT_KEY in rest:
            warn(
                "the hooks were not restored: fabric.load restores the hook of a model that it is"
                " given, as in fabric.load(path, {'model': model})"
            )
        return rest

    # ---- helpers
    # ----------------------------------------------------------------------------------------------

    def _hooks_in(self, state: Mapping[str, Any]) -> dict[str, CommHook]:
        return {
            name: hook
            for name, value in state.items()
            if isinstance(value, nn.Module) and (hook := self.hook_of(value)) is not None
        }

    def _load_hooks(self, state: Mapping[str, Any], saved: object, *, strict: bool) -> None:
        if not isinstance(saved, dict):
            raise PayloadError(
                f"the checkpoint's {CHECKPOINT_KEY!r} is a {type(saved).__name__}, not a dict by"
                " models"
            )
        hooks = self._hooks_in(state)
        take_over = [
            hook.prepare_load(saved[name], strict) for name, hook in hooks.items() if name in saved
        ]
        for apply in take_over:
            apply()
        for name, hook in hooks.items():
            if name not in saved:
                place = f"{name!r} in the checkpoint"
                warn(nothing_saved(place, "it was saved without CommHookDDP", hook.name))
        early = [
            name for name in saved if isinstance(state.get(name), nn.Module) and name not in hooks
        ]
        if early and not self._request.off:
            warn(
                f"the hook's state for {', '.join(map(repr, early))} was not restored, because the"
                " model has no hook yet: call fabric.setup before fabric.load"
            )

    def __getstate__(self) -> dict[str, Any]:
        # The spawn launcher pickles the strategy: pickles contain the configuration, never a hook.
        return {name: value for name, value in self.__dict__.items() if name != "_hooks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _hooks=weakref.WeakKeyDictionary())
