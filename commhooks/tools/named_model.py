"""The parameters of a model that the user names, either by a function that builds it or by a checkpoint file."""

import os
import re
import warnings
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from commhooks.checkpoint.checks import shown
from commhooks.checkpoint.cut_off import cut_off
from commhooks.compressors.base import Compressor
from commhooks.compressors.dotted_path import FILE_ENDING, current_folder_first, import_path, why_not_called
from commhooks.errors import CommHookError, HookConfigError
from commhooks.gradients.ddp import sparse_parameters
from commhooks.gradients.exclude import all_names, own_name
from commhooks.hook.model_plan import ModelPlan
from commhooks.hook.plan_model import plan_model
from commhooks.hook.request import HookRequest

_STATE_KEYS = ("state_dict", "model", "model_state_dict", "module")
"""Keys under which programs save a model's state dict: Lightning's, and other usual ones."""


@dataclass(frozen=True)
class NamedModel:
    """Parameters that DDP would reduce, by name, in the order of registration."""

    parameters: dict[str, torch.Tensor]
    all_names: dict[int, list[str]] = field(default_factory=dict)
    """By id, including those of frozen parameters; tied ones have several."""
    note: str = ""
    """A remark about the model for the output, as a sentence."""
    sparse: set[int] = field(default_factory=set)
    """Ids of those with sparse gradients."""

    @property
    def every_name(self) -> list[str]:
        return [name for names in self.all_names.values() for name in names]

    def planned(
        self, request: HookRequest, *, bucket_cap_mb: float | None = None, total_steps: int | None = None
    ) -> tuple[ModelPlan, Compressor[Any]]:
        """The plan of this model, and a compressor that makes such a plan; see `plan_model`."""
        plan = plan_model(
            self.parameters,
            request,
            all_names=self.all_names,
            sparse=self.sparse,
            bucket_cap_mb=bucket_cap_mb,
            total_steps=total_steps,
        )
        compressor = request.new_compressor(total_steps)
        assert compressor is not None  # `plan_model` has raised for a user's hook
        return plan, compressor


def named_model(target: str) -> NamedModel:
    """Load the model that `target` names: `package.module:function` or `file.py:function`, a function (or class) that
    returns an `nn.Module`, or the path of a checkpoint.

    Raises:
        HookConfigError: `target` does not exist or is not a model; the message gives the remedy.
    """
    if target.endswith(FILE_ENDING):
        raise HookConfigError(
            f"{target!r} is a Python file; write '{target}:build', where build is the function in it that takes no "
            "arguments and returns the nn.Module"
        )
    if os.path.exists(target):
        return from_checkpoint(Path(target))
    if ":" not in target:
        raise HookConfigError(
            f"{target!r} is neither a file nor 'package.module:function' or 'file.py:function', a function that "
            "returns an nn.Module"
        )
    with current_folder_first():  # also for imports while the model is built
        return from_module(target, _built(target, import_path(target, repr(target))))


def from_module(source: str, module: torch.nn.Module) -> NamedModel:
    names = all_names(module)
    reduced: dict[str, torch.Tensor] = {names[id(p)][0]: p for p in module.parameters() if p.requires_grad}
    frozen = sum(not p.requires_grad for p in module.parameters())
    if not reduced:
        raise HookConfigError(f"{source}: the model has no parameter that requires a gradient")
    note = f"{frozen} frozen parameters are left out." if frozen else ""
    return NamedModel(reduced, names, note, sparse_parameters(module))


def from_checkpoint(path: Path) -> NamedModel:
    """The floating-point tensors of a state dict. No code in the file is executed."""
    if path.is_dir():
        raise HookConfigError(f"{path} is a folder; give the file in it that holds the model's state dict")
    content = load_plain(path)
    state = _state_dict(content)
    if state is None:
        keys = ", ".join(map(shown, list(content)[:8])) if isinstance(content, dict) else type(content).__name__
        raise HookConfigError(
            f"{path} holds no state dict of a model: looked for tensors, and under "
            f"{', '.join(map(repr, _STATE_KEYS))}; it has {keys or 'nothing'}"
        )
    while all(name.startswith("module.") for name in state):  # saved from a DDP model
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    parameters: dict[str, torch.Tensor] = {}
    names: dict[int, list[str]] = {}
    first: dict[object, str] = {}  # the first name of the tensor at a place: tied ones share it
    for raw, tensor in state.items():
        if tensor.is_floating_point() or tensor.is_complex():
            name, start = own_name(raw), (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
            place = (*start, tensor.shape, tensor.stride()) if tensor.numel() else name
            if first.setdefault(place, name) == name:
                parameters[name] = tensor
            names.setdefault(id(parameters[first[place]]), []).append(name)
    if not parameters:
        raise HookConfigError(f"{path}: the state dict holds no floating-point tensor")
    note = "A checkpoint does not tell buffers and frozen parameters from the others: all of its tensors are shown."
    return NamedModel(parameters, names, note)


# Messages of torch 2.13 about objects that weights_only=True rejects. Other errors mean truncated or foreign files.
_FOREIGN = re.compile(
    r"(?:Unsupported global: GLOBAL|unsupported GLOBAL|but got|execute arbitrary function|"
    r"[Tt]rying to call reduce for unrecognized function) (\S.{0,100}?)(?: was not| whose module|\.? ?Please|\n|$)"
)


class UnreadableFileError(CommHookError):
    """A file that cannot be read: missing, damaged, or with other content than tensors and plain types."""


def load_plain(path: Path) -> Any:
    """`torch.load(weights_only=True)` with tensors on the CPU, memory-mapped if possible.

    Raises:
        UnreadableFileError: the message gives the reason. No code in the file was executed.
    """
    try:
        lazily = zipfile.is_zipfile(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about unusual pickles; real problems raise errors
            return torch.load(path, map_location="cpu", weights_only=True, mmap=lazily)
    except Exception as error:  # torch raises many kinds of exceptions for truncated or foreign files, OSError as well
        if cut := cut_off(path, error):
            raise UnreadableFileError(f"{path} {cut}") from None
        if isinstance(error, OSError):
            raise UnreadableFileError(f"{path} cannot be read: {error.strerror or error}") from error
        if foreign := _FOREIGN.search(str(error)):
            raise UnreadableFileError(
                f"{path} holds something else than tensors and plain types ({plain(foreign.group(1))}), so it is not "
                "read; nothing in it was executed"
            ) from None
        # Extract the reason from torch's message, without its suggestions.
        reason = " ".join(str(error).split()).rpartition("WeightsUnpickler error: ")[2]
        reason = re.split(r"\. | Check the documentation", reason)[0] or "it ends too early"
        raise UnreadableFileError(
            f"{path} is not a file of torch.save, or damaged ({type(error).__name__}: {plain(reason[:160])})"
        ) from None


def plain(text: str) -> str:
    """Escape control characters in text from an untrusted file, so that a terminal does not interpret them."""
    return text if text.isprintable() else repr(text)


def _state_dict(content: Any) -> dict[str, torch.Tensor] | None:
    if not isinstance(content, dict):
        return None
    tensors = {k: v for k, v in content.items() if isinstance(k, str) and isinstance(v, torch.Tensor)}
    if tensors:
        return tensors
    for key in _STATE_KEYS:
        inner = content.get(key)
        if isinstance(inner, dict) and (found := _state_dict(inner)):
            return found
    return None


def _built(target: str, found: Any) -> torch.nn.Module:
    if isinstance(found, torch.nn.Module):
        return found
    if not callable(found):
        raise HookConfigError(f"{target!r} is a {type(found).__name__}, not a function that returns an nn.Module")
    if reason := why_not_called(found):
        raise HookConfigError(
            f"{target!r} cannot be called without arguments ({reason}): write a function that builds the model"
        )
    model = found()
    if isinstance(model, tuple) and model:  # (model, batch_fn), as for `commhooks doctor`
        model = model[0]
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    if not isinstance(model, torch.nn.Module):
        raise HookConfigError(f"{target!r} returned a {type(model).__name__}, not an nn.Module")
    return model
