"""A user's own hook, and samples of wrong usage, ranks that differ, damaged states and commands: for
`compare_versions.py`. The tests of the suite have the long lists."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.stress.compare_records import caught
from tests.stress.compare_training import SMALL_MB, Net, Run, Situation


class Calls:
    """The state of a user's own hook."""

    def __init__(self) -> None:
        self.count = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count.clone()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.count = saved["count"].clone()


def own_hook(state: Calls, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.count += 1
    return commhooks.allreduce_hook(None, bucket)


WRONG: dict[str, dict[str, Any]] = {
    "typo": {"hook": "powerSDG"}, "no module": {"hook": "no_such_module:hook"},
    "an option": {"hook": "powerSGD", "hook_options": {"matrix_aproximation_rank": 2}},
    "a value": {"hook": "int8", "hook_options": {"block_size": 33}}, "nodes": {"hook": "fp16", "ranks_per_node": 0},
    "a fraction": {"hook": "powerSGD", "hook_options": {"start_powerSGD_iter": 0.1}},
    "wrapper": {"hook": "int8", "wrapper": "int4"}, "no model": {"hook": "fp16", "model": torch.nn.Linear(2, 2)},
    "state": {"hook": "int4", "hook_state": object()}, "scale": {"hook": "powerSGD", "loss_scale": lambda: 0.0},
}  # fmt: skip
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hook": ({"hook": "powerSGD"}, {"hook": own_hook}),
    "options": ({"hook": "int8", "hook_options": {"block_size": 32}}, {"hook": "int8"}),
    "wrapper": ({"hook": "powerSGD", "wrapper": "int8"}, {"hook": "powerSGD"}),
}


def _attached(model: Any = None, **arguments: Any) -> None:
    """With a backward pass."""
    model = DistributedDataParallel(Net(), bucket_cap_mb=SMALL_MB) if model is None else model
    commhooks.attach(model, **arguments)
    model(torch.ones(4, 2, 6, 6), torch.zeros(4, dtype=torch.long)).square().mean().backward()


def wrong_usage() -> dict[str, Any]:
    return {name: caught(lambda: _attached(**wrong)) for name, wrong in WRONG.items()}  # noqa: B023 - called here


def disagreement() -> dict[str, Any]:
    found = {name: caught(lambda: _attached(**pair[dist.get_rank()])) for name, pair in PAIRS.items()}  # noqa: B023
    run = Run({"hook": "powerSGD", "check_every": 1}, Situation()).train(2)
    if dist.get_rank():
        run.module.out.bias.data[0] += 1
    return found | {"drifted": caught(lambda: run.train(3))}


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing": lambda saved: None,
    "no parameters": lambda saved: saved.pop("parameters"),
    "a version": lambda saved: saved.update(version=2),
    "a parameter less": lambda saved: saved["parameters"].pop("trunk.weight"),
    "a shape": lambda saved: saved["parameters"]["trunk.weight"].update(shape=[24, 25]),
    "not finite": lambda saved: saved["parameters"]["trunk.weight"]["residual"][0].fill_(float("nan")),
}


def damaged(make: Callable[[], Any]) -> dict[str, Any]:
    """Each change of a good state, loaded strictly and not, and what is left then."""
    run, found = Run(make(), Situation()).train(5), {}
    good = run.hook.state_dict("per_rank")
    for name, change in DAMAGES.items():
        for strict in (True, False):
            saved = copy.deepcopy(good)
            change(saved)
            run.hook.load_state_dict(good)
            result = caught(lambda: run.hook.load_state_dict(saved, strict=strict))  # noqa: B023 - called here
            found[f"{name}, strict={strict}"] = [result, run.hook.state_dict("per_rank")]
    return found


_PLAN = ["plan", "tests.stress.compare_training:Net", "--codec-ms", "1.5"]
_SAVED = ("powerSGD", "alternate", "batched", "int8, torch", "own")
COMMANDS: list[list[str]] = [
    [], ["--version"], ["hooks"], ["nothing"], *([command, "--help"] for command in ("plan", "inspect", "doctor")),
    _PLAN, [*_PLAN, "--json"], [*_PLAN, "--hook", "batched_powerSGD"], [*_PLAN, "--hook", "int8", "--json"],
    [*_PLAN, "--wrapper", "int4", "--bucket-cap-mb", "0.004", "--world-size", "8", "--total-steps", "50"],
    [*_PLAN, "--options", "alternate=true", "exclude=['*conv*']", "--json"], [*_PLAN, "--options", "rnak=3"],
    [*_PLAN, "--hook", "nothing"], ["plan", "no_such_file.pt"], ["inspect", "no_such_file.pt"],
    *(["inspect", *more, f"{name}.pt"] for name in _SAVED for more in ([], ["--json"])),
]  # fmt: skip


def commands(hooks: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Status, output and errors of each command line."""
    files: dict[str, Any] = {name: Run(hooks[name](), Situation()).train(5).hook.state_dict() for name in _SAVED}
    dist.destroy_process_group()
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for name, content in files.items():
                torch.save(content, f"{name}.pt")
            return {" ".join(line): _command(line) for line in COMMANDS}
        finally:
            os.chdir(before)


def _command(line: list[str]) -> dict[str, Any]:
    argv, status, out, err = sys.argv, 0, io.StringIO(), io.StringIO()
    sys.argv = ["commhooks", *line]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_module("commhooks", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    finally:
        sys.argv = argv
    text = out.getvalue()
    return {"status": status, "out": json.loads(text) if "--json" in line and text else text, "err": err.getvalue()}
