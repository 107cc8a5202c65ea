"""torch's names and arguments work with our drop-in module, and torch's examples run."""

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks as torch_debugging_hooks
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as torch_default_hooks
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as torch_power_sgd
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.ddp_comm_hooks import debugging_hooks, default_hooks
from commhooks.ddp_comm_hooks import powerSGD_hook as power_sgd
from tests.support.ddp_steps import log_lines, mlp, replicas_equal, train, wrap

NAMES = {
    torch_default_hooks: [
        "allreduce_hook",
        "fp16_compress_hook",
        "bf16_compress_hook",
        "fp16_compress_wrapper",
        "bf16_compress_wrapper",
    ],
    torch_power_sgd: ["PowerSGDState", "powerSGD_hook", "batched_powerSGD_hook"],
    torch_debugging_hooks: ["noop_hook"],
}
OURS = {
    torch_default_hooks: default_hooks,
    torch_power_sgd: power_sgd,
    torch_debugging_hooks: debugging_hooks,
}
EVERY_NAME = [(module, name) for module, names in NAMES.items() for name in names]


# ---- signatures ----------------------------------------------------------------------------------


@pytest.mark.parametrize("module, name", EVERY_NAME, ids=[name for _, name in EVERY_NAME])
def test_arguments_and_defaults_are_those_of_torch(module, name):
    def arguments(thing: Any) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(thing).parameters.values()]

    ours = getattr(OURS[module], name)
    assert arguments(ours) == arguments(getattr(module, name))
    assert getattr(commhooks, name) is ours
    assert ours.__qualname__ == name  # what pickle goes by


def test_no_public_name_of_torch_is_missing():
    for module in NAMES:
        public = [
            name
            for name, thing in vars(module).items()
            if not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__
        ]
        assert sorted(public) == sorted(NAMES[module])
        assert sorted(OURS[module].__all__) == sorted(NAMES[module])


def test_the_state_has_the_ten_arguments_as_attributes():
    names = list(inspect.signature(torch_power_sgd.PowerSGDState).parameters)
    assert len(names) == 10
    values = [None, 3, 7, 1.5, False, False, 1e-8, 5, 11, True]
    state = commhooks.PowerSGDState(*values)
    assert [getattr(state, name) for name in names] == values
    assert state.iter == 0


# ---- docstring examples --------------------------------------------------------------------------


def docstring_examples() -> dict[str, str]:
    """The code of the `>>>` lines in the docstrings of torch's three modules, by function.

    From the first to the last of them: one of torch's statements goes on in a line without the
    "..." of doctest.
    """
    examples = {}
    for module, name in EVERY_NAME:
        lines = [
            line.strip() for line in (inspect.getdoc(getattr(module, name)) or "").splitlines()
        ]
        marked = [i for i, line in enumerate(lines) if line.startswith(">>>")]
        if marked:
            examples[name] = "\n".join(
                line.removeprefix(">>> ") for line in lines[marked[0] : marked[-1] + 1]
            )
    return examples


EXAMPLES = docstring_examples()


def test_all_of_torchs_examples_were_found():
    assert EXAMPLES.keys() == {name for _, name in EVERY_NAME} - {"PowerSGDState"}
    for code in EXAMPLES.values():
        assert "register_comm_hook" in code
        ast.parse(code)


def run_example(code: str, steps: int) -> tuple[int, float]:
    """Run torch's own lines with our names, and train with the result."""
    ddp_model = wrap(mlp())
    names = {name: getattr(commhooks, name) for _, name in EVERY_NAME}
    scope = names | {"ddp_model": ddp_model, "process_group": dist.group.WORLD}
    exec(code, scope)
    train(ddp_model, steps)
    if "noop" not in code:
        assert replicas_equal(ddp_model)
    state = scope.get("state")
    return state.iter if state else 0, state.compression_stats()[0] if state else 0


@pytest.mark.parametrize("name", EXAMPLES)
def test_torchs_example_runs(run_ranks, name):
    code = EXAMPLES[name]
    begins = "start_powerSGD_iter" in code  # at step 10
    trained = 12 if begins else 3
    for steps, rate in run_ranks(run_example, code, trained):
        if "PowerSGDState" in code:
            assert steps == trained
            assert (rate > 1) == begins  # otherwise 1000 steps would come first
        else:
            assert "state" not in code


# ---- torch's example of saving and reloading -----------------------------------------------------


class SimpleModel(nn.Module):
    """The model of the page "DDP Communication Hooks"."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(24, 24)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.relu(self.fc1(x)))


def demo_serialization(path: str, steps_before: int) -> tuple[int, list[str]]:
    """The steps of that page: register, save on rank 0, load on every rank, register what was
    loaded.

    The page never trains; here every model does.
    """
    rank = dist.get_rank()
    ddp_model = DistributedDataParallel(SimpleModel(), bucket_cap_mb=0.001)
    powersgd_hook = power_sgd.powerSGD_hook
    powersgd_state = power_sgd.PowerSGDState(process_group=None, start_powerSGD_iter=2)
    ddp_model.register_comm_hook(powersgd_state, powersgd_hook)
    train(ddp_model, steps_before)

    state = {
        "state_dict": ddp_model.state_dict(),
        "comm_hook": powersgd_hook,
        "comm_hook_state": powersgd_state,
    }
    if rank == 0:
        torch.save(state, path)
    dist.barrier()
    with log_lines() as lines:
        checkpoint = torch.load(path, weights_only=False)
        new_ddp_model = DistributedDataParallel(SimpleModel(), bucket_cap_mb=0.001)
        new_ddp_model.load_state_dict(checkpoint["state_dict"])
        new_state, new_hook = checkpoint["comm_hook_state"], checkpoint["comm_hook"]
        assert new_hook is commhooks.powerSGD_hook and new_state is not powersgd_state
        assert new_state.iter == steps_before and new_state.process_group is None
        new_ddp_model.register_comm_hook(new_state, new_hook)
        train(new_ddp_model, 4, first_step=steps_before)
    assert replicas_equal(new_ddp_model)
    assert new_state.compression_stats()[0] > 1
    return new_state.iter, lines


@pytest.mark.parametrize("steps_before", [0, 5])
def test_torchs_example_of_saving_and_reloading_runs(run_ranks, tmp_path: Path, steps_before):
    results = run_ranks(demo_serialization, str(tmp_path / "checkpoint.pt"), steps_before)
    for rank, (steps, lines) in enumerate(results):
        assert steps == steps_before + 4
        assert any("Process group will be set to a default group" in line for line in lines)
        dropped = [line for line in lines if "residual of at least one rank is missing" in line]
        # Rank 0's memory is not rank 1's: all ranks do without, and one of them says so.
        assert len(dropped) == (1 if rank == 0 and steps_before == 5 else 0), textwrap.indent(
            "\n".join(lines), "  "
        )
