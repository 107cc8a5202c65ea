"""The private names in docs/versions.md: the code uses these and no others, and they exist.

What torch's names do is in test_torch_private.py.
"""

import ast
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel

from commhooks.gradients import torch_private
from tests.support.ddp_steps import process_group_of_one
from tests.support.features import custom_collectives
from tests.support.repository import PACKAGES, REPOSITORY, nodes

TEXT = (REPOSITORY / "docs" / "versions.md").read_text(encoding="utf-8")
LISTED = re.findall(r"^\| `([^`]+)` \|", TEXT.partition("## Private names")[2], re.MULTILINE)
OF_TORCH = (
    "torch.",
    "DistributedDataParallel.",
    "Parameter.",
    "OptimizedModule.",
    "FSDPModule.",
    "FSDPState.",
    "FSDPParamGroup.",
)


def _last(name: str) -> str:
    return re.findall(r"\w+", name)[-1]


def _is_private(name: object) -> bool:
    return isinstance(name, str) and re.match(r"_[A-Za-z]", name) is not None


def _own() -> set[str]:
    """The private names that the packages give to their own things."""
    names = {"_C"}  # torch's, of which the names behind it count
    for node in itertools.chain(*nodes().values()):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def _used() -> Iterator[tuple[str, str]]:
    """File and name of every use of a private name that is not of these packages."""
    defined_here = _own()
    listed = {_last(name) for name in LISTED}
    for file, of_file in nodes().items():
        for node in of_file:
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch._C":
                yield file, node.attr  # private, whatever its name
            elif isinstance(node, ast.Attribute) and _is_private(node.attr):
                of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if node.attr not in defined_here or node.attr in listed and not of_self:
                    yield file, node.attr
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "getattr",
                "hasattr",
                "setattr",
                "_needed",
            ):
                name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
                if (
                    _is_private(name)
                    or name is not None
                    and ast.unparse(node.args[0]) == "torch._C"
                ):
                    yield file, name
            elif isinstance(node, ast.arg) and _is_private(node.arg):
                yield file, node.arg
            elif (
                isinstance(node, ast.ImportFrom)
                and node.module
                and not node.module.startswith(PACKAGES)
            ):
                yield from ((file, name.name) for name in node.names if _is_private(name.name))


def test_the_code_uses_what_is_listed():
    used = {
        (file, name)
        for file, name in _used()
        if (file, name) != ("accelerate_commhooks/handler.py", "_getframe")
    }
    assert {name for _, name in used} == {_last(name) for name in LISTED}
    assert len(LISTED) == len(set(LISTED)) == len({_last(name) for name in LISTED})
    of_torch = {_last(name) for name in LISTED if name.startswith(OF_TORCH)}
    assert {file for file, name in used if name in of_torch} == {
        "commhooks/gradients/torch_private.py"
    }


def _ddp() -> DistributedDataParallel:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with Join([ddp]):
        return ddp


def _param_group() -> Any:
    return fully_shard(nn.Linear(2, 2))._get_fsdp_state()._fsdp_param_group


def _fit_loop() -> Any:
    from lightning.pytorch import Trainer

    return Trainer(logger=False, enable_checkpointing=False, accelerator="cpu").fit_loop


def _accelerator() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def _hooked() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(1))
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    return parameter


def _in_backward() -> nn.Parameter:
    from torch.distributed.optim import _apply_optimizer_in_backward

    parameter = nn.Parameter(torch.ones(1))
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})
    return parameter


def _replicated() -> Any:
    from torch.distributed._composable.replicate import replicate

    model = replicate(nn.Linear(2, 2))
    model(torch.ones(2))
    return replicate.state(model)


def _arguments_of_save_model() -> Any:
    transformers = pytest.importorskip("transformers")
    return SimpleNamespace(**inspect.signature(transformers.Trainer.save_model).parameters)


OWNERS: dict[str, Callable[[], Any]] = {
    "torch._C": lambda: torch._C,
    "torch.autograd.Variable": lambda: torch.autograd.Variable,
    "torch": lambda: torch,
    "torch.autograd": lambda: torch.autograd,
    "torch.Tensor": lambda: torch.Tensor,
    "torch.distributed.distributed_c10d": lambda: dist.distributed_c10d,
    "torch.distributed.ProcessGroup": lambda: dist.ProcessGroup,
    "torch.distributed.Backend.Options": lambda: dist.ProcessGroupGloo._Options,
    "DistributedDataParallel": _ddp,
    "Parameter._in_backward_optimizers": _in_backward,
    "Parameter._post_accumulate_grad_hooks": _hooked,
    "torch.distributed._composable.replicate._ReplicateState": _replicated,
    "OptimizedModule": lambda: torch.compile(nn.Linear(2, 2), backend="eager"),
    "FSDPModule": lambda: FSDPModule,
    "FSDPState": FSDPState,
    "FSDPParamGroup": _param_group,
    "Trainer.fit_loop": _fit_loop,
    "Trainer.fit_loop.epoch_loop": lambda: _fit_loop().epoch_loop,
    "Accelerator": _accelerator,
    "Trainer.save_model": _arguments_of_save_model,
}


OF_SHARDS = ("FSDPParamGroup._all_gather_comm", "FSDPParamGroup._reduce_scatter_comm")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=custom_collectives if name in OF_SHARDS else ()) for name in LISTED],
)
def test_what_is_listed_exists(name):
    owner, _, attribute = re.match(r"(.*?)([.(])(\w+)\)?$", name).groups()
    with process_group_of_one():
        assert hasattr((OWNERS.get(name) or OWNERS[owner])(), attribute)


def test_a_torch_that_lacks_a_needed_name_is_told_on_import():
    with pytest.raises(
        ImportError,
        match=(
            rf"torch\._C\._no_such, a private name that torch {re.escape(torch.__version__)} lacks"
        ),
    ):
        torch_private._needed(torch._C, "_no_such")
    needed = set(re.findall(r"_needed\([\w.]+, \"(\w+)\"", inspect.getsource(torch_private)))
    rows = re.findall(r"^\| `([^`]+)` \|.*\| (.*) \|$", TEXT, re.MULTILINE)
    told = {_last(name) for name, then in rows if then == "the same" or "import commhooks" in then}
    assert told == needed


def test_without_the_other_names_nothing_is_refused():
    anything = SimpleNamespace()
    assert not torch_private.joined_with_uneven_division(anything)
    assert not torch_private.has_optimizer_in_backward(anything)
    assert not torch_private.count_accumulate_hooks(anything)
    assert torch_private.all_reduces(anything)
    assert torch_private.unit_of_fsdp(anything, [], is_root=True) is None
    assert torch_private.compiled_from(anything) is None
    assert torch_private.timeout_of(anything, torch.device("cpu")) is None


def test_without_lightnings_name_the_monitor_counts_optimizer_steps():
    from lightning_commhooks.callbacks import _x_axis

    trainer = SimpleNamespace(global_step=7, fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace()))
    assert _x_axis(trainer) == 7


def test_the_store_of_a_group_is_the_same_by_its_private_name(monkeypatch):
    with process_group_of_one():
        group = dist.group.WORLD
        torch_private.store_of(group).set("here", "1")
        assert dist.distributed_c10d._get_process_group_store(group).get("here") == b"1"
