"""What `CommHookFSDP2` adds to Lightning's FSDP2 strategy: a hook between sharded replicas."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional, Union

from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from commhooks import HookConfigError, Shards, Torchft
from commhooks.hook.plugin_api import (
    DCPFolder,
    HookRequest,
    arguments_in,
    check_value,
    nothing_saved,
    suggests_arguments,
    warn_of_unsharded,
)
from lightning_commhooks.checkpoint import CHECKPOINT_KEY
from lightning_commhooks.strategy import HookedStrategy, HookType, warn

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
else:
    ModelParallelStrategy = object  # see strategy.py


class HookedFSDP2(HookedStrategy, ModelParallelStrategy):
    """The mixin of `CommHookFSDP2` in `lightning_pytorch.py` and `pytorch_lightning.py`."""

    @suggests_arguments
    def __init__(
        self,
        hook: HookType = None,
        *,
        replicate_size: Union[Literal["auto"], int] = "auto",  # noqa: UP007
        hook_options: Optional[dict[str, Any]] = None,  # noqa: UP045
        wrapper: Optional[Literal["fp16", "bf16"]] = None,  # noqa: UP045
        save_residual: Optional[Literal["drop"]] = None,  # noqa: UP045
        strict: bool = True,
        check_every: Optional[int] = None,  # noqa: UP045
        members: Union[Torchft, Literal["torchft"], None] = None,  # noqa: UP007
        shards: Union[Shards, Literal["int8", "bf16"], None] = None,  # noqa: UP007
        process_group_backend: Optional[str] = None,  # noqa: UP045
        timeout: Optional[timedelta] = default_pg_timeout,  # noqa: UP045
    ) -> None:
        expected = "a number of replicas, or 'auto'"
        self._replicate_size: Any = check_value(
            "replicate_size", replicate_size, int | str, expected
        )
        if save_residual not in (None, "drop"):
            raise HookConfigError(
                f"save_residual={save_residual!r}; expected 'drop', or None: distributed"
                " checkpoints hold the mean"
            )
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self._request = HookRequest.parse(
            **arguments_in(locals()) | {"save_residual": save_residual or "mean"}
        )
        self._mesh: DeviceMesh | None = None

    # ---- what users call
    # ---------------------------------------------------------------------------------------------

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh with the dimensions "replicate" and "shard"."""
        if self._mesh is None:
            raise RuntimeError(
                "the device mesh exists once the processes have connected, as in configure_model"
            )
        return self._mesh

    def _arguments(self) -> str:
        return f"{super()._arguments()}, replicate_size={self._replicate_size!r}"

    # ---- what Lightning calls
    # ----------------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        super().setup_environment()
        replicas = self._replicate_size
        if replicas == "auto":  # without a hook between replicas there is one
            replicas = 1 if self._request.shards_alone else self.num_nodes
        if self.world_size % replicas:
            raise HookConfigError(
                f"replicate_size={replicas} does not divide the number of ranks, which is"
                f" {self.world_size}"
            )
        shape = (replicas, self.world_size // replicas)
        self._mesh = init_device_mesh(
            self.root_device.type, shape, mesh_dim_names=("replicate", "shard")
        )

    def setup(self, trainer: "pl.Trainer") -> None:
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        assert self.lightning_module is not None
        root = _sharded_root(self.lightning_module)
        _check_shards(self.lightning_module, root, self.device_mesh["shard"])
        replicas = self.device_mesh["replicate"]
        alone = self._request.shards_alone and replicas.size() == 1
        self._attach(root, replicate_group=None if alone else replicas)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context manager for gradient accumulation, like DDP's `no_sync`.

        Neither FSDP nor the hook communicates. FSDP keeps unsharded gradients meanwhile.
        """
        assert self.lightning_module is not None
        root = _sharded_root(self.lightning_module)
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        # Lightning asks for the weights before it reads anything else that it saves.
        if self._saved_hook is not None:
            self._saved_hook.synchronize(optimizers=True)
        return super().lightning_module_state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        is_full = "optimizer_states" in checkpoint
        path = Path(self.broadcast(filepath))
        self._folder_in(path).remove()
        super().save_checkpoint(checkpoint, path, storage_options)
        if is_full and self._saved_hook is not None:
            self._folder_in(path).save(self._saved_hook)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        take_over = None
        hook = self._saved_hook if self._trainer.state.fn == "fit" else None
        # Check the hook's state before the model and the optimizers load theirs.
        if hook is not None and (folder := self._folder_in(path)).is_complete():
            take_over = folder.prepare_load(hook, strict=self._request.strict)
        weights_only = True if weights_only is None else weights_only
        loaded = super().load_checkpoint(path, weights_only=weights_only)
        if take_over is not None:
            take_over()
        elif hook is not None:
            why = "it was saved without CommHookFSDP2, or its save was interrupted"
            warn(nothing_saved("the checkpoint", why, hook.name))
        return loaded

    def _prepare_callbacks(self, trainer: Any) -> None:
        super()._prepare_callbacks(trainer)
        if any(isinstance(callback, self.checkpoint_callback) for callback in trainer.callbacks):
            raise HookConfigError(
                "CommHookFSDP2 saves its hook itself: leave out the CommHookCheckpoint callback"
            )

    def _folder_in(self, checkpoint: Path) -> DCPFolder:
        return DCPFolder(checkpoint / CHECKPOINT_KEY, "CommHookFSDP2", self.broadcast)


def _sharded_root(module: "pl.LightningModule") -> Any:
    roots: dict[str, Any] = {}
    for name, part in module.named_modules():  # parents come before their children
        inside = any(root == "" or name.startswith(f"{root}.") for root in roots)
        if isinstance(part, FSDPModule) and not inside:
            roots[name] = part
    if len(roots) != 1:
        raise HookConfigError(
            "CommHookFSDP2 needs one sharded module that contains all others, and found "
            f"{list(roots) or 'none'}: end configure_model with fully_shard(self.net, "
            "mesh=self.trainer.strategy.device_mesh['shard'])"
        )
    (root,) = roots.values()
    return root


def _check_shards(module: "pl.LightningModule", root: Any, shards: DeviceMesh) -> None:
    alone = []
    inside = {id(parameter) for parameter in root.parameters()}  # `attach` warns about these
    for name, parameter in module.named_parameters():
        data: object = parameter
        if not isinstance(data, DTensor):
            if parameter.requires_grad and id(parameter) not in inside:
                alone.append(name)
        elif data.device_mesh.mesh.flatten().tolist() != shards.mesh.tolist():
            raise HookConfigError(
                f"parameter {name} is sharded over another mesh than this strategy's,"
                f" {data.device_mesh}: give fully_shard"
                " mesh=self.trainer.strategy.device_mesh['shard'] (self.device_mesh is Lightning's"
                " own)"
            )
    if module.trainer.is_global_zero:
        warn_of_unsharded(alone)
