"""Saved states that are damaged or of other models, and what the commands print: cases of `compare_versions.py`."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from compare_errors import backward, caught, new
from compare_observed import Case
from compare_training import WIDTH, Momentum, Net, Run, Situation, digest, momentum_hook
from torch import nn

import commhooks

# ----------------------------------------------------------------------------------------------------- damaged payloads


def _put(*path: Any) -> Callable[[Any], Callable[[dict[str, Any]], None]]:
    def with_value(value: Any) -> Callable[[dict[str, Any]], None]:
        def change(payload: dict[str, Any]) -> None:
            inside: Any = payload
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = value(inside[path[-1]]) if callable(value) else value

        return change

    return with_value


def _pop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(payload: dict[str, Any]) -> None:
        inside: Any = payload
        for key in path[:-1]:
            inside = inside[key]
        del inside[path[-1]]

    return change


_ENTRY = ("parameters", "trunk.weight")
_TOP = {
    "format": ["other", None, 1], "version": [0, 2, True, "1", None], "hook": ["allreduce", "batched_powerSGD", 3],
    "options": [None, [], {}, {"start_powerSGD_iter": "x"}], "step": [-1, 2**70, 1.0, True, None, "3"],
    "nonfinite_steps": [-1, None], "world_size": [0, 3, None, 2**40], "exact": [False, 1, None],
    "loss_scale": [0.0, -1, float("nan"), 2.0, 1e40, None, "1"], "residual": ["mean", "none", "x", None, ["mean"]],
    "residual_ranks": [[], [1], [0, 0], [-1], None, (0,)], "parameters": [None, {}, []], "hook_state": [1],
    "batched_q": [None, {"x": torch.zeros(2, 2)}, {"batched.1": torch.zeros(2)}, {"batched.1": torch.zeros(2, 2)}],
}  # fmt: skip
_INSIDE: dict[str, list[Any]] = {
    "shape": [[24], [24, 25], (24, 24), None, [24, -1]],
    "row_dim": [1, 2, -1, None, True],
    "q": [None, 3, torch.Tensor.half, torch.Tensor.double, torch.Tensor.long, lambda t: t[:1], lambda t: t[:, :-1],
          lambda t: torch.cat([t, t]), torch.zeros_like, lambda t: t + float("inf"), lambda t: t.double() + 1e300,
          torch.Tensor.to_sparse, lambda t: t.to("meta"), lambda t: torch.ones(1).expand(2**40)],
    "residual": [None, [], lambda each: each[0], lambda each: each * 2, lambda each: [each[0][:1]],
                 lambda each: [each[0] + float("nan")], lambda each: [each[0] + 1e36], lambda each: [each[0].half()],
                 lambda each: [torch.zeros_like(each[0])]],
}  # fmt: skip
DAMAGES: dict[str, Callable[[dict[str, Any]], None]] = {"nothing": lambda payload: None}
DAMAGES |= {f"no {key}": _pop(key) for key in _TOP} | {f"no {key} inside": _pop(*_ENTRY, key) for key in _INSIDE}
DAMAGES |= {f"{key} {n}": _put(key)(value) for key, values in _TOP.items() for n, value in enumerate(values)}
DAMAGES |= {
    f"inside: {key} {n}": _put(*_ENTRY, key)(value) for key, values in _INSIDE.items() for n, value in enumerate(values)
}
DAMAGES |= {
    "a parameter is gone": _pop(*_ENTRY),
    "a parameter more": lambda payload: payload["parameters"].update(more=payload["parameters"]["trunk.bias"]),
    "a parameter is renamed": lambda p: p["parameters"].update(new=p["parameters"].pop("trunk.weight")),
    "an entry is no dict": _put(*_ENTRY)(3),
    "a P": lambda payload: payload["parameters"]["trunk.weight"].update(p=torch.ones(2, 24)),
    "a P that does not fit": lambda payload: payload["parameters"]["trunk.weight"].update(p=torch.ones(2, 23)),
    "another parameter's": lambda p: p["parameters"].update({"trunk.weight": p["parameters"]["out.weight"]}),
}


def damaged(hook: str) -> dict[str, Any]:
    """Each change of a good payload, loaded strictly and not; a load that works is followed by a step."""
    run = Run(hook, Situation()).train(5)
    good = run.hook.state_dict("per_rank")
    found: dict[str, Any] = {}
    for name, change in DAMAGES.items():
        for strict in (True, False):
            payload = copy.deepcopy(good)
            try:
                change(payload)
            except (KeyError, TypeError, IndexError, AttributeError):  # nothing of that kind in this hook's payload
                continue
            run.hook.load_state_dict(good)
            before = _digest_of(run.hook)
            result = caught(lambda payload=payload, strict=strict: run.hook.load_state_dict(payload, strict=strict))  # type: ignore[misc]
            if result["error"] is None:
                result["step"] = caught(lambda: backward(run.ddp))
            else:
                result["untouched"] = before == _digest_of(run.hook)
            found[f"{name}, {'strict' if strict else 'not strict'}"] = result | {"after": _digest_of(run.hook)}
    return found


def _digest_of(hook: Any) -> list[Any]:
    tensors: list[torch.Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            collect(item)

    payload = hook.state_dict("per_rank")
    collect(payload)
    return [digest(tensors), payload["step"], hook.options.get("start_powerSGD_iter")]


class Refuses(Momentum):
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        raise KeyError("no")


class Unsaveable(Momentum):
    def state_dict(self) -> dict[str, Any]:
        return {"what": object()}


def mismatched() -> dict[str, Any]:
    """Payloads of other models, hooks and states."""
    payloads = {hook: Run(hook, Situation()).train(5).hook.state_dict() for hook in
                ("powerSGD 2", "batched", "alternate", "allreduce", "own", "own without state")}  # fmt: skip
    smaller, wider, frozen = Net(), Net(), Net()
    del smaller.branch
    wider.out = nn.Linear(WIDTH, 30)
    frozen.branch.requires_grad_(False)
    found: dict[str, Any] = {}
    for strict in (True, False):
        for name, payload in payloads.items():
            modules = {"the same": Net(), "smaller": smaller, "wider": wider, "frozen": frozen, "64": Net().double()}
            for kind, module in modules.items():
                for hook in ("powerSGD", "batched_powerSGD", "bf16"):
                    key = f"{name} into {hook} of {kind}, {'strict' if strict else 'not strict'}"
                    target = commhooks.attach(new(module), hook)
                    result = caught(lambda t=target, p=payload, s=strict: t.load_state_dict(p, strict=s))  # type: ignore[misc]
                    found[key] = result | {"after": _digest_of(target)}
        for state in (Momentum(), Refuses(), Unsaveable(), None):
            for name in ("own", "own without state"):
                payload = payloads[name] | {"hook": "momentum_hook"}
                target = commhooks.attach(new(), momentum_hook, hook_state=state)
                result = caught(lambda t=target, p=payload, s=strict: t.load_state_dict(p, strict=s))  # type: ignore[misc]
                saved = caught(lambda t=target: str(t.state_dict()["hook_state"]))  # type: ignore[misc]
                found[f"{name} into {type(state).__name__}, strict={strict}"] = {"load": result, "save": saved}
    return found


# --------------------------------------------------------------------------------------------------------- the commands

_MODELS = """
import torch
from torch import nn
class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.sparse = nn.Embedding(50, 32), nn.Embedding(40, 16, sparse=True)
        self.conv, self.half = nn.Conv2d(8, 16, 3), nn.Linear(32, 32, dtype=torch.bfloat16)
        self.imaginary = nn.Parameter(torch.zeros(8, 8, dtype=torch.complex64))
        self.frozen, self.head = nn.Linear(9, 9).requires_grad_(False), nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
not_a_model = lambda: 3
"""
_PLAN = ["plan", "small_models:Small", "--codec-ms", "1.5"]
COMMANDS: list[list[str]] = [
    [], ["--version"], ["--help"], ["hooks"], ["hooks", "--help"], ["plan", "--help"], ["inspect", "--help"],
    ["doctor", "--help"], ["nothing"], _PLAN, [*_PLAN, "--json"],
    ["plan", "examples.doctor_transformer:LanguageModel", "--codec-ms", "2", "--json"],
    ["plan", "examples.doctor_transformer:build", "--codec-ms", "2", "--options", "matrix_approximation_rank=4",
     "--exclude", "*embed*", "no_such*"],
    [*_PLAN, "--hook", "batched_powerSGD"], [*_PLAN, "--hook", "fp16", "--json"], [*_PLAN, "--hook", "noop"],
    [*_PLAN, "--wrapper", "bf16", "--bucket-cap-mb", "0.004", "--world-size", "8", "--total-steps", "50"],
    [*_PLAN, "--options", "alternate=true", "fused=true", "exclude=['*conv*']", "--json"],
    ["plan", "weights.pt", "--codec-ms", "1"], ["plan", "no_such_file.pt"], ["plan", "small_models:not_a_model"],
    [*_PLAN, "--options", "rank"], [*_PLAN, "--options", "rnak=3"], [*_PLAN, "--world-size", "1"],
    [*_PLAN, "--hook", "nothing"], ["plan", "small_models:Small", "--device", "cuda"],
    ["doctor", "small_models:Small"], ["doctor", "small_models:Small", "--json", "no/such/folder.json"],
    *(["inspect", *more, f"{name}.pt"] for name in
      ("per_rank", "mean", "drop", "gathered", "alternate", "batched", "own", "damaged", "whole", "weights")
      for more in ([], ["--json"])),
    ["inspect", "no_such_file.pt"], ["inspect", "small_models.py"], ["inspect", "."],
]  # fmt: skip


def commands() -> dict[str, Any]:
    """Status, output and errors of each command line, run on rank 0 as `python -m commhooks` runs them."""
    files: dict[str, Any] = {"weights": Net().state_dict()}
    run = Run("powerSGD 2", Situation()).train(6)
    files |= {kind: run.hook.state_dict(kind) for kind in ("per_rank", "drop")}
    files["gathered"] = run.hook.state_dict("per_rank", gather=True)
    files["mean"] = run.hook.state_dict("mean")
    for name in ("alternate", "batched", "own"):
        files[name] = Run(name, Situation()).train(6).hook.state_dict("per_rank")
    files["whole"] = {"model": Net().state_dict(), "a": [1, {"hook": files["mean"]}], "b": files["alternate"]}
    files["damaged"] = copy.deepcopy(files["mean"])
    files["damaged"]["parameters"]["trunk.weight"]["q"] += float("nan")
    dist.destroy_process_group()
    if run.rank != 0:
        return {}
    found: dict[str, Any] = {}
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        try:
            Path("small_models.py").write_text(_MODELS)
            for name, content in files.items():
                torch.save(content, f"{name}.pt")
            for line in COMMANDS:
                found[" ".join(line)] = _command(line)
            real = [sys.executable, "-m", "commhooks", "hooks"]
            done = subprocess.run(real, capture_output=True, text=True, timeout=60)
            found["hooks, in a process of its own"] = [done.returncode, done.stdout, done.stderr]
        finally:
            os.chdir(before)
            sys.path.remove(folder)
    return found


def _command(line: list[str]) -> dict[str, Any]:
    argv, status = sys.argv, 0
    sys.argv = ["commhooks", *line]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_module("commhooks", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    except Exception as error:
        status = f"{type(error).__name__}: {error}"  # type: ignore[assignment]
    finally:
        sys.argv = argv
    text = out.getvalue()
    return {"status": status, "out": json.loads(text) if "--json" in line and text else text, "err": err.getvalue()}


def payload_cases() -> list[Case]:
    cases = [Case(1, f"{hook} damaged", damaged, (hook,), many=True) for hook in
             ("powerSGD 2", "batched", "alternate", "own", "allreduce")]  # fmt: skip
    return [*cases, Case(1, "mismatched", mismatched, many=True), Case(2, "commands", commands, many=True)]
