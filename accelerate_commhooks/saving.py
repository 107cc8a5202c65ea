"""Saves and loads the state of hooks in `accelerator.save_state` and `load_state`.

Accelerate calls the functions passed to `register_save_state_pre_hook` and
`register_load_state_pre_hook` on every rank that saves or loads. Each model has one shared file,
which the main process writes, and one file per rank:

    comm_hook.pt        comm_hook_rank0.pt      comm_hook_rank1.pt      the first model with a hook
    comm_hook_1.pt      comm_hook_1_rank0.pt    comm_hook_1_rank1.pt    the second

With "per_rank" and "drop" no rank waits for another. With "mean" a save waits for at most
`joint_save_limit_s`, so that one on the main process alone does not hang either.
docs/checkpoint_format.md describes the files. A model sharded by FSDP2 has a folder, `comm_hook` or
`comm_hook_1`, which all ranks write together.
"""

import contextlib
import functools
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from commhooks import CommHook, PayloadError
from commhooks.errors import errors_begin_with, logger_of
from commhooks.hook.plugin_api import (
    DCPFolder,
    compiled_from,
    cut_off,
    nothing_saved,
    payload_parts,
    print_error_on_rank_zero,
)

logger = logger_of(__name__)

_REMEDY = "Load another checkpoint, or remove its comm_hook*.pt files to continue with fresh state"

LARGE_SAVE_BYTES = 10 * 10**9
"""If a save has more bytes of residuals, over all ranks, the main process suggests
`save_residual="mean"`.
"""

_OURS = re.compile(r"comm_hook(?:_(\d+))?((?:_rank(\d+))?\.pt)?")
"""Groups: the number of the model; for files, not for folders, the rest of the name; the rank in
it.
"""


class HookedModel:
    """Refers to a wrapped model and its hook, weakly.

    Attributes:
        is_sharded: by FSDP2; otherwise the model is wrapped in DDP.
    """

    def __init__(
        self, model: torch.nn.Module, hook: CommHook, strict: bool, save_residual: str
    ) -> None:
        self.is_sharded = isinstance(model, FSDPModule)
        self.strict = strict
        self.save_residual = save_residual
        self._model = weakref.ref(model)
        self._hook = weakref.ref(hook)

    @property
    def hook(self) -> CommHook | None:
        hook = self._hook()
        return None if self._model() is None or hook is None or hook.detached else hook

    def is_of(self, model: torch.nn.Module) -> bool:
        mine = self._model()
        return mine is not None and self.hook is not None and unwrapped(model) is unwrapped(mine)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the original module in `model`, which may be compiled, wrapped in DDP, or both."""
    while True:
        if (original := compiled_from(model)) is not None:
            model = original
        elif isinstance(model, DistributedDataParallel):
            model = model.module
        else:
            return model


_SAVERS: "weakref.WeakKeyDictionary[Accelerator, HookSaver]" = weakref.WeakKeyDictionary()
"""The savers, shared by all handlers of an accelerator."""


def ensure_hook_saver(accelerator: Accelerator) -> "HookSaver":
    """Return the `HookSaver` of `accelerator`, which the first call makes and registers.

    It is needed without a hook, too, because its saves remove hook files that an earlier run has
    left in the folder.
    """
    saver = _SAVERS.get(accelerator)
    if saver is None:
        saver = _SAVERS[accelerator] = HookSaver(accelerator)
    return saver


def any_model_has_hook() -> bool:
    """Return whether a model of any accelerator that still exists has a hook."""
    return any(saver.has_hook() for saver in _SAVERS.values())


class HookSaver:
    """Saves and loads the hooks of one accelerator's models, numbered in order of preparation.

    A model keeps its number when another is deleted. `free_memory` restarts the numbering, as for
    Accelerate's own files. If a module is prepared again, the hook of its latest wrapped model is
    saved.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._of_modules: weakref.WeakKeyDictionary[torch.nn.Module, HookedModel] = (
            weakref.WeakKeyDictionary()
        )
        self._warned_about_size = False
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(lambda models, folder: self.load(folder))

    def add(self, model: torch.nn.Module, hooked: HookedModel) -> None:
        self._of_modules[unwrapped(model)] = hooked
        if hooked.hook is not None and hooked.hook.stats()["step_in_round"] is not None:
            self._end_rounds_before("save_model")
            if hooked.is_sharded:
                self._end_rounds_before("save_state")

    def has_hook(self) -> bool:
        return any(model.hook is not None for model in self._of_modules.values())

    def save(self, folder: str, *, writes_shared: bool) -> None:
        """Write this rank's files into an existing folder.

        With `writes_shared` write the shared files, too, and remove files of an earlier save that
        no current hook overwrites, because they belong to other weights. All ranks must call this
        if a hook has `save_residual="mean"` or averages weights, or if a model is sharded.
        """
        accelerator = self._live_accelerator()
        rank = accelerator.process_index
        models = self._numbered()
        for number, model in enumerate(models):
            if model.is_sharded and (hook := model.hook) is not None:
                _folder(folder, number).remove()
                _folder(folder, number).save(hook)

        # `state_dict` needs all ranks, which run through the same models in the same order. The
        # states are made one after another, so that only one is in memory.
        def files() -> Iterator[tuple[Path, dict[str, Any] | None]]:
            for number, model in enumerate(models):
                if not model.is_sharded and (hook := model.hook) is not None:
                    shared, part = payload_parts.split(hook.state_dict(), rank, hook.run_number)
                    path = _path(folder, number)
                    yield _of_rank(path, rank), part  # None removes the file of an earlier save
                    if writes_shared:
                        yield path, shared
            if writes_shared:
                for path in _left_over(folder, models, accelerator.num_processes):
                    yield path, None

        write_together(files(), rank)
        self._warn_about_size(models)

    @print_error_on_rank_zero()
    def load(self, folder: str) -> None:
        """Load the files of `save` into the hooks of the prepared models.

        All ranks must call this. Raises PayloadError, and changes nothing on this rank, if a file
        is damaged or does not fit. The other ranks notice at the next backward pass.
        """
        # Check everything before applying anything, so that an error leaves all models unchanged.
        take_over: list[Callable[[], None]] = []
        for number, model in enumerate(self._numbered()):
            if (hook := model.hook) is None:
                continue
            path = _path(folder, number)
            dcp_folder = _folder(folder, number)
            if model.is_sharded and dcp_folder.is_complete():
                take_over.append(dcp_folder.prepare_load(hook, strict=model.strict))
            elif not model.is_sharded and (saved := self._read(path)) is not None:
                with errors_begin_with(path, remedy=_REMEDY):
                    take_over.append(hook.prepare_load(saved))
            elif self._live_accelerator().is_main_process:
                name = path.stem if model.is_sharded else path.name
                logger.warning(nothing_saved(folder, name, hook.name))
        for apply in take_over:
            apply()

    # ---- what Accelerate calls
    # ---------------------------------------------------------------------------------------

    def _save(
        self, models: list[torch.nn.Module], weights: list[dict[str, Any]], output_dir: str
    ) -> None:
        accelerator = self._live_accelerator()
        everywhere = accelerator.project_configuration.save_on_each_node
        main = accelerator.is_local_main_process if everywhere else accelerator.is_main_process
        self.save(output_dir, writes_shared=main)

    def _end_rounds_before(self, name: str) -> None:
        """Override the accelerator's method `name`: end the round of every hook, then call it.

        Accelerate 1.15 calls no pre-hook in `save_model`, and writes sharded weights before it
        calls the pre-hooks of `save_state`. So these public methods are overridden, on this one
        object.
        """
        accelerator = self._live_accelerator()
        method = getattr(type(accelerator), name)

        @functools.wraps(method)
        def ends_rounds_first(*args: Any, **kwargs: Any) -> Any:
            for model in self._numbered():
                if (hook := model.hook) is not None:
                    hook.synchronize(optimizers=name == "save_state")
            return method(self._live_accelerator(), *args, **kwargs)

        setattr(accelerator, name, ends_rounds_first)

    # ---- helpers
    # ----------------------------------------------------------------------------------------------

    def _warn_about_size(self, models: list[HookedModel]) -> None:
        if self._warned_about_size or not self._live_accelerator().is_main_process:
            return
        hooks = [model.hook for model in models if model.save_residual == "per_rank"]
        size = sum(hook.plan().saved_residuals for hook in hooks if hook is not None)
        if size > LARGE_SAVE_BYTES:
            self._warned_about_size = True
            logger.warning(
                "every save writes about %.0f GB of residuals, all ranks together"
                " (save_residual='per_rank'). save_residual='mean' writes one copy for all ranks,"
                " and all ranks must take part in the save.",
                size / 1e9,
            )

    def _numbered(self) -> list[HookedModel]:
        """Return the models with a hook, in order of preparation.

        Without models that `free_memory` has released. Accelerate 1.15 passes a list of its models
        to load pre-hooks only, which an earlier pre-hook may have emptied.
        """
        prepared = getattr(self._live_accelerator(), "_models", self._of_modules)
        modules = dict.fromkeys(map(unwrapped, prepared))
        return [self._of_modules[module] for module in modules if module in self._of_modules]

    def _read(self, path: Path) -> dict[str, Any] | None:
        accelerator = self._live_accelerator()
        rank = accelerator.process_index
        world_size = accelerator.num_processes
        if not path.exists():
            if _of_rank(path, rank).exists():
                raise PayloadError(
                    f"{path} is missing, though {_of_rank(path, rank).name} exists: the main"
                    " process writes the shared part of the communication hook's state. Copy it"
                    f" from that machine. {_REMEDY}"
                )
            return None
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises many kinds for truncated or foreign files
            raise PayloadError(f"{path} {_unreadable(path, error)}. {_REMEDY}") from error
        with errors_begin_with(path, remedy=_REMEDY):
            shared = payload_parts.check_shared(content)
        needed = payload_parts.ranks_needed(shared, rank, world_size)
        if shared.get("hook_state") is not None and not needed and accelerator.is_main_process:
            logger.warning(
                "the state of hook %r was saved by %s ranks, and now there are %s: every rank gets"
                " rank 0's state.",
                shared["hook"],
                shared["world_size"],
                world_size,
            )
        # one at a time: they are large
        parts = (_part(_of_rank(path, saved_by), shared, saved_by) for saved_by in needed)
        return payload_parts.merge(shared, parts, rank, world_size)

    def _live_accelerator(self) -> Accelerator:
        accelerator = self._accelerator()
        assert accelerator is not None  # the accelerator is the caller
        return accelerator


def _left_over(folder: str, models: list[HookedModel], ranks: int) -> Iterator[Path]:
    kept = {
        (number, model.is_sharded) for number, model in enumerate(models) if model.hook is not None
    }
    for path in Path(folder).iterdir():
        if (ours := _OURS.fullmatch(path.name)) is not None:
            number = int(ours[1] or 0)
            is_sharded = ours[2] is None
            read = _folder(folder, number).last_file if is_sharded else path
            if ((number, is_sharded) not in kept or int(ours[3] or 0) >= ranks) and read.is_file():
                yield read


def _part(path: Path, shared: dict[str, Any], rank: int) -> dict[str, Any] | None:
    """Return the part of `rank`; None, with a warning, if it is unusable.

    Does not raise, because the other ranks would not know of the error. At the next backward pass
    the ranks exchange whether residuals are missing.
    """
    part: Any = None
    try:
        part = torch.load(path, map_location="cpu", weights_only=True)
        problem = payload_parts.problem_of_part(shared, part, rank)
    except FileNotFoundError:
        problem = "is missing"
    except Exception as error:  # as in `_read`
        problem = _unreadable(path, error)
    if problem is None:
        return part
    logger.warning("%s %s: it counts as missing.", path, problem)
    return None


def _path(folder: str, number: int) -> Path:
    return Path(folder) / (f"comm_hook_{number}.pt" if number else "comm_hook.pt")


def _folder(folder: str, number: int) -> DCPFolder:
    path = _path(folder, number)

    def broadcast(content: Any) -> Any:
        return broadcast_object_list([content])[0]

    return DCPFolder(path.with_name(path.stem), "CommHookKwargs", broadcast)


def _of_rank(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}_rank{rank}.pt")


def _unreadable(path: Path, error: Exception) -> str:
    reason = (str(error).splitlines() or [""])[0]
    return cut_off(path, error) or f"cannot be read ({type(error).__name__}: {reason})"


# -------------------------------------------------------------------------------------------------
# files, all or none


def write_together(files: Iterable[tuple[Path, dict[str, Any] | None]], rank: int) -> None:
    """Save each content at its path; None removes the file of an earlier save. Every file is
    replaced as a whole. An error while writing, such as a full disk, leaves all files unchanged and
    raises OSError, which names the file. A killed process leaves files `.NAME.RANK.tmp`, which are
    never read; the next save overwrites them.
    """
    temporary: dict[Path, Path | None] = {}  # by final path
    try:
        for path, content in files:
            temporary[path] = None
            if content is not None:
                temporary[path] = beside = path.with_name(f".{path.name}.{rank}.tmp")
                with _os_errors_name(path), open(beside, "wb") as file:
                    try:
                        torch.save(content, file)
                    except RuntimeError as error:
                        # torch 2.13 raises "unexpected pos 640 vs 598" instead of the disk's error.
                        if isinstance(error.__context__, OSError):
                            raise error.__context__ from None
                        raise
                    file.flush()
                    # otherwise a power cut may leave an empty file under the new name
                    os.fsync(file.fileno())
        # removals come last
        for path, written in sorted(temporary.items(), key=lambda item: item[1] is None):
            with _os_errors_name(path):
                if written is None:
                    path.unlink(missing_ok=True)
                else:
                    os.replace(written, path)
    finally:
        for written in filter(None, temporary.values()):
            with contextlib.suppress(OSError):
                written.unlink(missing_ok=True)


@contextlib.contextmanager
def _os_errors_name(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
