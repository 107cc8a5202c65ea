"""Attaches the hooks of one handler to models that Accelerate has prepared."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator, DistributedType

from accelerate_commhooks.prepare import replicas_of
from accelerate_commhooks.saving import HookedModel, ensure_hook_saver, unwrapped
from accelerate_commhooks.yaml_settings import Settings
from commhooks import AttachError, CommHook, HookConfigError
from commhooks.errors import logger_of
from commhooks.hook.plugin_api import HookRequest, ScaleOf, attach_request

logger = logger_of(__name__)


class HookedModels:
    """The models with a hook of one handler, weakly, in order of preparation."""

    def __init__(self) -> None:
        self._hooked: list[HookedModel] = []
        self.were_attached = False
        """Whether any model ever had a hook."""

    @property
    def hooks(self) -> list[CommHook]:
        return [hook for hooked in self._hooked if (hook := hooked.hook) is not None]

    def has(self, model: torch.nn.Module) -> bool:
        return any(hooked.is_of(model) for hooked in self._hooked)

    def attach(
        self,
        model: torch.nn.Module,
        request: HookRequest,
        accelerator: Accelerator | None,
        total_steps: int | None,
        settings: Settings | None,
    ) -> None:
        """Attach the hook of `request` to a prepared model. Every rank must call this.

        The model is wrapped in DDP; sharded by FSDP2 within each replica; or neither, on a machine
        of one process in a run with other machines. In the last two cases this replaces an earlier
        hook. `settings`: where the request is from, for the message of the launcher.
        """
        kind = None if accelerator is None else accelerator.distributed_type
        more: dict[str, Any] = {}
        if accelerator is not None and kind is DistributedType.FSDP:
            _check_residuals_of_shards(request)
            self._detach_earlier(model)
            more["replicate_group"] = replicas_of(accelerator, request)
        elif accelerator is not None and kind is DistributedType.NO:
            self._detach_earlier(model)
            model = unwrapped(model)
            gradient_state = accelerator.gradient_state
            more["accumulates"] = lambda: not gradient_state.sync_gradients
        self._check_hook_state(request.hook_state)
        message = None if settings is None else settings.message
        hook = attach_request(
            model,
            request,
            total_steps=total_steps,
            loss_scale=None if accelerator is None else _loss_scale(accelerator),
            on_unused=message,
            **more,
        )
        self.were_attached = True
        if message is not None:
            message("")
        saver = None if accelerator is None else ensure_hook_saver(accelerator)
        if request.off:
            return
        hooked = HookedModel(model, hook, request.strict, request.save_residual)
        self._hooked.append(hooked)
        if saver is not None:
            saver.add(model, hooked)
        else:
            logger.warning(
                "hook %r was attached without an accelerator: no save_state includes its state.",
                hook.name,
            )

    def _detach_earlier(self, model: torch.nn.Module) -> None:
        for hooked in self._hooked:
            if hooked.is_of(model) and (hook := hooked.hook) is not None:
                hook.detach()

    def _check_hook_state(self, hook_state: Any) -> None:
        self._hooked = [hooked for hooked in self._hooked if hooked.hook is not None]
        if self._hooked and callable(getattr(hook_state, "state_dict", None)):
            raise AttachError(
                f"hook_state ({type(hook_state).__name__}) is one object, and is used by another"
                " model. Give each model a handler of its own, or make states by a factory:"
                " commhooks.register_hook(name, factory)"
            )


def _check_residuals_of_shards(request: HookRequest) -> None:
    if request.save_residual == "per_rank":
        raise HookConfigError(
            "save_residual='per_rank' with a model sharded by FSDP2; expected 'mean' (the default),"
            " the mean over the replicas, or 'drop'"
        )


def _loss_scale(accelerator: Accelerator) -> Callable[[], Any]:
    accelerator_ref = weakref.ref(accelerator)
    # The scaler may be set later, so it is looked up at each call.
    return ScaleOf(lambda: getattr(accelerator_ref(), "scaler", None), accelerator.device)
