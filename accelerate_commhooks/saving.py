"""Save and load hooks in `accelerator.save_state` and `load_state`.

Accelerate calls the functions registered with `register_save_state_pre_hook` and `register_load_state_pre_hook` on
every rank that saves or loads, before it writes or reads its own files. Per model there is one shared file, which the
main process writes, and one file per rank:

    comm_hook.pt        comm_hook_rank0.pt      comm_hook_rank1.pt      the first model with a hook
    comm_hook_1.pt      comm_hook_1_rank0.pt    comm_hook_1_rank1.pt    the second

No rank waits for another one, so that saving on the main process alone does not hang. docs/checkpoint_format.md
describes the files. A model sharded by FSDP2 has a folder in place of the files, which all ranks write together, as
Accelerate does with such a model:

    comm_hook    comm_hook_1
"""

import functools
import itertools
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list

from accelerate_commhooks.atomic_write import write_together
from accelerate_commhooks.prepared import HookedModel, unwrapped
from commhooks import CommHook, PayloadError
from commhooks.errors import logger_of
from commhooks.hook.for_plugins import HookFolder, cut_off, located, nothing_saved, payload_parts, reason_first

logger = logger_of(__name__)

_REMEDY = "Load another checkpoint, or remove its comm_hook*.pt files to continue with fresh memory"

_OURS = re.compile(r"comm_hook(?:_(\d+))?((?:_rank\d+)?\.pt)?")
"""The names of our files, and without the second group of our folders; the first one is the number of the model."""

_Check = Callable[[CommHook], Callable[[], None]]
"""Checks what was saved for a hook. Returns a function that lets the hook take it over."""

# One `SavedHooks` per accelerator, shared by all of its handlers, as long as the accelerator exists.
_SAVED_HOOKS: "weakref.WeakKeyDictionary[Accelerator, SavedHooks]" = weakref.WeakKeyDictionary()


def saved_hooks(accelerator: Accelerator) -> "SavedHooks":
    """The `SavedHooks` of `accelerator`; created and registered with it at the first call."""
    known = _SAVED_HOOKS.get(accelerator)
    if known is None:
        known = _SAVED_HOOKS[accelerator] = SavedHooks(accelerator)
    return known


class HookedSave:
    """The `save_state` or `save_model` of an accelerator with a handler: first registers the save and load hooks, since
    the folder may hold those of an earlier save though no model has a hook now, and ends the rounds of hooks that
    average weights. A pickled accelerator has the method of its class.

    Accelerate 1.15 registers nothing during its construction, tells handlers nothing of models that it does not wrap,
    writes sharded weights before it calls save hooks, and calls none in `save_model`. So these public methods are
    overridden, on this one object.
    """

    def __init__(self, accelerator: Accelerator, name: str) -> None:
        self._accelerator, self._name = weakref.ref(accelerator), name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        accelerator: Any = self._accelerator()
        saved_hooks(accelerator).end_rounds(state=self._name == "save_state")
        return getattr(type(accelerator), self._name)(accelerator, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._accelerator(), self._name)


def override_saves(accelerator: Accelerator) -> None:
    for name in ("save_state", "save_model"):
        setattr(accelerator, name, HookedSave(accelerator, name))


class SavedHooks:
    """The hooks of one accelerator's models, numbered in the order in which the models were prepared.

    A model keeps its number when another one is deleted. `free_memory` restarts the numbering, as for Accelerate's own
    files. A module that is prepared again keeps its number, and the hook of its latest DDP model is saved.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._models: list[HookedModel] = []
        self._loaded_early: dict[int, _Check] = {}
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(lambda models, folder: self.load(folder))

    def add(self, model: HookedModel) -> None:
        """Add a newly prepared model; a state loaded for it earlier is applied now."""
        if self._freed(added=model.module):
            self._models = []
        number = next((i for i, known in enumerate(self._models) if known.module is model.module), len(self._models))
        self._models[number : number + 1] = [model]
        early = self._loaded_early.pop(number, None)
        if early is not None and model.hook is not None:
            early(model.hook)()

    def end_rounds(self, *, state: bool) -> None:
        """End the rounds of hooks that average weights. `state`: for `save_state`, where the hook of a DDP model does
        so by itself when it is saved."""
        for model in self._models:
            if (hook := model.hook) is not None and (model.is_sharded or not state):
                hook.synchronize(optimizers=state)

    def save(self, folder: str, *, writes_shared: bool) -> None:
        """Write this rank's files into an existing folder, and with `writes_shared` also the shared ones. Files of an
        earlier save there, for which there is no hook now, are removed: they belong to other weights.

        No rank waits for another one, unless a hook has `save_residual="mean"` or averages weights, or its model is
        sharded: then all ranks must call this.

        Raises:
            OSError: as `write_together`.
            HookRunError: the folder of an earlier save cannot be removed.
        """
        rank = self._live_accelerator().process_index
        for number, model in enumerate(self._models):
            if model.is_sharded and (hook := model.hook) is not None:
                _folder(folder, number).remove()
                _folder(folder, number).save(hook)

        def files() -> Iterator[tuple[Path, dict[str, Any] | None]]:
            for number, model in enumerate(self._models):
                if not model.is_sharded and (hook := model.hook) is not None:
                    shared, own = payload_parts.split(hook.state_dict(), rank, hook.run_number)
                    path = _path(folder, number)
                    yield _of_rank(path, rank), own  # None: an earlier save in this folder may have left one
                    if writes_shared:
                        yield path, shared
            for path in self._left_over(folder) if writes_shared else ():
                yield path, None

        write_together(files(), rank)

    @reason_first()
    def load(self, folder: str) -> None:
        """Load the files of `save`. All ranks must call this. States of models that are not prepared yet are applied
        when they are.

        Raises:
            PayloadError: a file is damaged or does not fit. Nothing was changed.
        """
        accelerator = self._live_accelerator()
        without = accelerator.distributed_type is DistributedType.NO or getattr(accelerator.ddp_handler, "off", False)
        if without and not self._models:
            return  # no model will have a hook
        # Check everything before applying anything, so that an error leaves all models unchanged.
        take_over: list[Callable[[], None]] = []
        early: dict[int, _Check] = {}
        for number in itertools.count():
            path, known = _path(folder, number), number < len(self._models)
            is_sharded = self._models[number].is_sharded if known else path.with_suffix("").is_dir()
            if not known and not is_sharded and not path.exists():
                break
            hook = self._models[number].hook if known else None
            if is_sharded:
                check: _Check = functools.partial(self._from_folder, folder, number)
            elif (saved := self._read(path, hook)) is not None:
                check = functools.partial(_checked, saved, path)
            else:
                continue
            if hook is not None:
                take_over.append(check(hook))
            if not known or self._freed():
                early[number] = check
        for each in take_over:
            each()
        self._loaded_early = early

    # ---- what Accelerate calls ---------------------------------------------------------------------------------------

    def _save(self, models: list[torch.nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        accelerator = self._live_accelerator()
        everywhere = accelerator.project_configuration.save_on_each_node
        main = accelerator.is_local_main_process if everywhere else accelerator.is_main_process
        self.save(output_dir, writes_shared=main)

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _left_over(self, folder: str) -> Iterator[Path]:
        """What an earlier save in `folder` has left and a load would read, of hooks that are not saved now."""
        kept = {(number, model.is_sharded) for number, model in enumerate(self._models) if model.hook is not None}
        for path in Path(folder).iterdir():
            if (ours := _OURS.fullmatch(path.name)) is not None:
                number, is_sharded = int(ours[1] or 0), ours[2] is None
                read = _folder(folder, number).last_file if is_sharded else path
                if (number, is_sharded) not in kept and read.is_file():
                    yield read

    def _from_folder(self, folder: str, number: int, hook: CommHook) -> Callable[[], None]:
        saved = _folder(folder, number)
        if saved.is_complete():
            return saved.prepare_load(hook, strict=self._models[number].strict)
        if self._live_accelerator().is_main_process:
            logger.warning(nothing_saved(folder, _path(folder, number).stem, hook.name))
        return lambda: None

    def _read(self, path: Path, hook: CommHook | None) -> dict[str, Any] | None:
        """The payload for this rank, of the model whose shared file is `path`; None if the checkpoint has none."""
        accelerator = self._live_accelerator()
        rank, world_size = accelerator.process_index, accelerator.num_processes
        if not path.exists():
            if _of_rank(path, rank).exists():
                raise PayloadError(
                    f"{path} is missing, though {_of_rank(path, rank).name} is there: the shared part of the "
                    f"communication hook's state is written by the main process. Copy it from there. {_REMEDY}"
                )
            if hook is not None and accelerator.is_main_process:
                logger.warning(nothing_saved(path.parent, path.name, hook.name))
            return None
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises many kinds of exceptions for truncated or foreign files
            raise PayloadError(f"{path} {_unreadable(path, error)}. {_REMEDY}") from error
        with located(path, _REMEDY):
            shared = payload_parts.check_shared(content)
        needed = payload_parts.ranks_needed(shared, rank, world_size)
        if shared.get("hook_state") is not None and not needed and accelerator.is_main_process:
            logger.warning(
                "the state of hook %r was saved by %s ranks, now there are %s: every rank gets the state of rank 0.",
                shared["hook"],
                shared["world_size"],
                world_size,
            )
        parts = (_part(_of_rank(path, each), shared, each) for each in needed)  # one at a time: they are large
        return payload_parts.merge(shared, parts, rank, world_size)

    def _freed(self, added: torch.nn.Module | None = None) -> bool:
        """Whether the accelerator has released all models since they were prepared. `added`: one that it has just got.

        Accelerate 1.15 has no callback for `free_memory`. Its list of models, which save hooks receive, has no public
        name; load hooks receive a copy, which other hooks may have emptied. Without that list: never.
        """
        prepared = getattr(self._live_accelerator(), "_models", None)
        if prepared is None:
            return False
        modules = [unwrapped(each) for each in prepared]
        if sum(each is added for each in modules) > 1:  # prepared twice
            return False
        kept = {id(each) for each in modules if each is not added}
        return not any(id(known.module) in kept for known in self._models)

    def _live_accelerator(self) -> Accelerator:
        accelerator = self._accelerator()
        assert accelerator is not None  # the accelerator is the caller
        return accelerator


def _part(path: Path, shared: dict[str, Any], rank: int) -> dict[str, Any] | None:
    """The part of `rank`; None and a warning if it is unusable.

    Does not raise, because the other ranks would not know of the error. The ranks exchange at the next backward pass
    whether residuals are missing.
    """
    part: Any = None
    try:
        part = torch.load(path, map_location="cpu", weights_only=True)
        problem = payload_parts.problem_of_part(shared, part, rank)
    except FileNotFoundError:
        problem = "is missing"
    except Exception as error:  # as above
        problem = _unreadable(path, error)
    if problem is None:
        return part
    logger.warning("%s %s: it counts as missing.", path, problem)
    return None


def _path(folder: str, number: int) -> Path:
    return Path(folder) / (f"comm_hook_{number}.pt" if number else "comm_hook.pt")


def _folder(folder: str, number: int) -> HookFolder:
    path = _path(folder, number)
    return HookFolder(path.with_name(path.stem), "CommHookKwargs", lambda given: broadcast_object_list([given])[0])


def _of_rank(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.stem}_rank{rank}.pt")


def _checked(saved: dict[str, Any], path: Path, hook: CommHook) -> Callable[[], None]:
    with located(path, _REMEDY):
        return hook.prepare_load(saved)


def _unreadable(path: Path, error: Exception) -> str:
    reason = (str(error).splitlines() or [""])[0]
    return cut_off(path, error) or f"cannot be read ({type(error).__name__}: {reason})"
