"""What wrong usage ends in: cases of `compare_versions.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from compare_observed import Case, log_lines
from compare_training import (
    SMALL_MB,
    Net,
    Run,
    Situation,
    batch,
    momentum_hook,
    without_state_hook,
)
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import commhooks

Wrong = Callable[[], object]


def caught(wrong: Wrong) -> dict[str, Any]:
    """The class of the error with its bases, its text, and what was logged."""
    with log_lines() as lines:
        try:
            result = wrong()
        except Exception as error:
            classes = [each.__name__ for each in type(error).__mro__]
            return {"error": classes, "text": str(error), "cause": repr(error.__cause__), "log": lines}
    return {"error": None, "result": result if isinstance(result, (str, int, dict, list)) else None, "log": lines}


def new(module: nn.Module | None = None, **ddp: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Net() if module is None else module, **({"bucket_cap_mb": SMALL_MB} | ddp))


def backward(ddp: Any, step: int = 0) -> None:
    ddp.zero_grad(set_to_none=True)
    ddp(*batch(step, dist.get_rank(), next(ddp.parameters()).dtype)[:2]).square().mean().backward()


def _attach(hook: Any = "powerSGD", model: Any = None, **arguments: Any) -> Wrong:
    return lambda: commhooks.attach(new() if model is None else model(), hook, **arguments)


def _options(hook: str = "powerSGD", **options: Any) -> Wrong:
    return _attach(hook, hook_options=options)


def _bare(state: Any, function: Any = None, model: Any = Net) -> Wrong:
    def run() -> None:
        ddp = new(model())
        ddp.register_comm_hook(state() if callable(state) else state, function or commhooks.powerSGD_hook)
        backward(ddp)

    return run


def _backward(hook: Any, **arguments: Any) -> Wrong:
    def run() -> None:
        ddp = new()
        commhooks.attach(ddp, hook, **arguments)
        backward(ddp)

    return run


def no_arguments() -> None: ...
def returns_nothing(state: Any, bucket: Any) -> None: ...
def returns_a_tensor(state: Any, bucket: Any) -> Any:
    return bucket.buffer()


def returns_another_size(state: Any, bucket: Any) -> Any:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0][:1])


def raises(state: Any, bucket: Any) -> Any:
    raise ZeroDivisionError("in the user's code")


def factory(options: dict[str, Any], process_group: Any) -> Any:
    """The first line.

    Another one.
    """
    return None, without_state_hook


def bad_factory(options: dict[str, Any], process_group: Any) -> Any:
    return without_state_hook


not_callable = 3


def _twice() -> None:
    ddp = new()
    commhooks.attach(ddp, "powerSGD")
    commhooks.attach(ddp, "allreduce")


def _one_state_two_models() -> None:
    state = commhooks.PowerSGDState(None)
    kept = [new(), new()]
    for ddp in kept:
        commhooks.attach(ddp, commhooks.powerSGD_hook, hook_state=state)


def _one_state_two_hooks() -> None:
    state = commhooks.PowerSGDState(None)
    _bare(state)()
    _bare(state, commhooks.batched_powerSGD_hook)()


def _registered(name: Any, made: Any, then: bool = False) -> Wrong:
    def run() -> None:
        commhooks.register_hook(name, made)
        if then:
            commhooks.attach(new(), name)

    return run


def _frozen() -> DistributedDataParallel:
    ddp = new()
    ddp.module.requires_grad_(False)
    return ddp


def _python_reducer() -> None:
    ddp = new()
    registered: list[Any] = []
    ddp.register_comm_hook = lambda state, hook: registered.extend((state, hook))  # type: ignore[method-assign]
    commhooks.attach(ddp, "powerSGD")
    registered[1](registered[0], (torch.zeros(3), torch.zeros(3)))


def _mixed_precision() -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    commhooks.attach(new(mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16)), "powerSGD")


def _method(name: str, *arguments: Any, hook: Any = "powerSGD", **named: Any) -> Wrong:
    return lambda: getattr(commhooks.attach(new(), hook), name)(*arguments, **named)


def _config(kind: Any, **options: Any) -> Wrong:
    return lambda: repr(kind(**options))


VALUES = [("matrix_approximation_rank", each) for each in (0, 1.5, None, "four", True, [4])]
VALUES += [("start_powerSGD_iter", each) for each in (-1, 0.0, 1.0, 2.5, -0.5, float("nan"), "soon", True, 2**70)]
VALUES += [("min_compression_rate", each) for each in (0, -1, float("inf"), "much", None, False, 10**400)]
VALUES += [("exclude", each) for each in ("*embed*", [4], [""], None, {"a": 1})]
VALUES += [("use_error_feedback", each) for each in ("maybe", 2.5, 1, "true", "no")]
VALUES += [("warm_start", None), ("orthogonalization_epsilon", -1e-8), ("random_seed", 0.5), ("random_seed", "x")]
VALUES += [("compression_stats_logging_frequency", 1.5), ("alternate", "x"), ("fused", 3), ("rank", 2), ("", 1)]

WRONG: dict[str, Wrong] = {
    "hook: typo": _attach("powerSDG"),
    "hook: other case": _attach("POWERSG"),
    "hook: nothing near": _attach("zzz"),
    "hook: a number": _attach(3),
    "hook: None": _attach(None),
    "hook: a class": _attach(commhooks.PowerSGD),
    "hook: wrong signature": _attach(no_arguments),
    "hook: no such module": _attach("no_such_module:hook"),
    "hook: no such function": _attach("compare_errors:rases"),
    "hook: not callable": _attach("compare_errors:not_callable"),
    "hook: path without a module": _attach(":x"),
    "hook: relative path": _attach(".rel:x"),
    "hook: path without a function": _attach("torch:"),
    "hook: path without a colon": _attach("mypkg.hooks.hook"),
    "option: typo": _options(matrix_aproximation_rank=2),
    "option: of none": _options("allreduce", rank=2),
    "option: exclude for batched": _options("batched_powerSGD", exclude=["*"]),
    "option: alternate for batched": _options("batched_powerSGD", alternate=True),
    "option: alternate without warm start": _options(alternate=True, warm_start=False),
    "options beside a config": _attach(commhooks.PowerSGD(), hook_options={"warm_start": False}),
    "options beside a callable": _attach(raises, hook_options={"a": 1}),
    "options: a list": _attach(hook_options=[1]),
    "state with a name": _attach(hook_state=object()),
    "state with a config": _attach(commhooks.AllReduce(), hook_state=object()),
    "state of a wrong type": _attach(commhooks.batched_powerSGD_hook, hook_state={"rank": 1}),
    "wrapper: typo": _attach(wrapper="fp61"),
    "wrapper: a number": _attach(wrapper=16),
    "save_residual: typo": _attach(save_residual="per_rang"),
    "save_residual: None": _attach(save_residual=None),
    "strict: text": _attach(strict="yes"),
    "check_every: 0": _attach(check_every=0),
    "check_every: text": _attach(check_every="often"),
    "check_every: noop": _attach("noop", check_every=3),
    "total_steps: 0": _attach(total_steps=0),
    "total_steps: text": _attach(total_steps="many"),
    "start: fraction of an unknown length": _options(start_powerSGD_iter=0.1),
    "loss_scale: a number": _attach(loss_scale=65536.0),
    "loss_scale: returns text": _backward("powerSGD", loss_scale=lambda: "much"),
    "loss_scale: returns 0": _backward("powerSGD", loss_scale=lambda: 0.0),
    "loss_scale: returns nan": _backward("powerSGD", loss_scale=lambda: torch.tensor(float("nan"))),
    "process_group: text": _attach(process_group="gloo"),
    "model: not DDP": _attach(model=lambda: nn.Linear(2, 2)),
    "model: None": lambda: commhooks.attach(None, "powerSGD"),  # type: ignore[arg-type]
    "model: compiled": _attach(model=lambda: torch.compile(new(), backend="eager")),
    "model: mixed precision": _mixed_precision,
    "model: all frozen": _attach(model=_frozen),
    "model: a hook already": _twice,
    "model: nothing to compress": _attach(model=lambda: new(nn.Linear(4, 2))),
    "state: two models": _one_state_two_models,
    "state: two hooks": _one_state_two_hooks,
    "state: None": _bare(None),
    "state: a dict, batched": _bare({}, commhooks.batched_powerSGD_hook),
    "state: fraction": lambda: commhooks.PowerSGDState(None, start_powerSGD_iter=0.1),  # type: ignore[arg-type]
    "state: wrong type": lambda: commhooks.PowerSGDState(None, matrix_approximation_rank="2"),  # type: ignore[arg-type]
    "run: nothing returned": _backward(returns_nothing),
    "run: a tensor returned": _backward(returns_a_tensor),
    "run: a tensor returned, wrapped": _backward(returns_a_tensor, wrapper="bf16"),
    "run: another size, wrapped": _backward(returns_another_size, wrapper="fp16"),
    "run: raises": _backward(raises),
    "run: python reducer": _python_reducer,
    "register: built-in name": _registered("power-sgd", factory),
    "register: alias": _registered("FP16", factory),
    "register: colon": _registered("a:b", factory),
    "register: space": _registered("my hook", factory),
    "register: number": _registered(3, factory),
    "register: no factory": _registered("mine", 3),
    "register: not a pair": _registered("unpaired", bad_factory, then=True),
    "register: good": _registered("good", factory, then=True),
    "register: twice": _registered("Good", factory),
    "available hooks": commhooks.available_hooks,
    "exported": lambda: sorted(commhooks.__all__),
    "version": lambda: commhooks.__version__,
    "state_dict: typo": _method("state_dict", "means"),
    "state_dict: before a pass": _method("state_dict", "mean"),
    "load: None": _method("load_state_dict", None),
    "load: a dict": _method("load_state_dict", {"a": 1}),
    "sample_cosine: 0": _method("sample_cosine", 0),
    "sample_cosine: text": _method("sample_cosine", "x"),
    "sample_cosine: own hook": _method("sample_cosine", 3, hook=without_state_hook),
    "doctor: not DDP": lambda: commhooks.doctor(Net(), print),  # type: ignore[arg-type]
    "doctor: one rank": lambda: commhooks.doctor(new(), print),  # type: ignore[arg-type]
}


def wrong_usage() -> dict[str, Any]:
    found = {name: caught(wrong) for name, wrong in WRONG.items()}
    for name, value in VALUES:
        options = {name: value}
        shown = f"{name}={str(value)[:20]}"
        found[f"value {shown}"] = {
            "by name": caught(_options(**options)),
            "config": caught(_config(commhooks.PowerSGD, **options)),
            "batched config": caught(_config(commhooks.BatchedPowerSGD, **options)),
            "state": caught(lambda options=options: commhooks.PowerSGDState(None, **options)),  # type: ignore[misc]
        }
    for config in (commhooks.AllReduce, commhooks.FP16Compress, commhooks.BF16Compress, commhooks.Noop,
                   commhooks.PowerSGD, commhooks.BatchedPowerSGD):  # fmt: skip
        found[f"repr of {config.__name__}"] = [repr(config()), config.hook_name, str(config.__doc__)]
    return found


# -------------------------------------------------------------------------------------------------- ranks that disagree

_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hook": ({"hook": "powerSGD"}, {"hook": "fp16"}),
    "rank": ({"hook": commhooks.PowerSGD(matrix_approximation_rank=2)}, {"hook": commhooks.PowerSGD()}),
    "length": ({"hook": "powerSGD", "total_steps": 100}, {"hook": "powerSGD", "total_steps": 200}),
    "wrapper": ({"hook": "powerSGD", "wrapper": "bf16"}, {"hook": "powerSGD"}),
    "own": ({"hook": momentum_hook}, {"hook": "allreduce"}),
    "save_residual": ({"hook": "fp16", "save_residual": "mean"}, {"hook": "fp16"}),
    "check_every": ({"hook": "fp16", "check_every": 5}, {"hook": "fp16"}),
    "loss scale": ({"hook": "powerSGD", "loss_scale": lambda: 2.0}, {"hook": "powerSGD"}),
    "exclude": ({"hook": commhooks.PowerSGD(exclude=["a*"])}, {"hook": "powerSGD"}),
}


def disagreement() -> dict[str, Any]:
    rank = min(dist.get_rank(), 1)
    found = {}
    for name, pair in _PAIRS.items():
        ddp = new()
        found[name] = caught(lambda ddp=ddp, pair=pair: commhooks.attach(ddp, **pair[rank]))  # type: ignore[misc]
        found[name]["then"] = caught(lambda ddp=ddp: commhooks.attach(ddp, "powerSGD"))  # type: ignore[misc]
    frozen, renamed = Net(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if rank == 1:
        frozen.register_parameter("extra", nn.Parameter(torch.zeros(3), requires_grad=False))
        renamed = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 8))
    found["frozen"] = caught(_attach("fp16", lambda: new(frozen)))
    found["renamed"] = caught(_attach("fp16", lambda: new(renamed)))
    found["all frozen"] = caught(_attach("fp16", _frozen))
    found["frozen on one"] = caught(_attach("fp16", _frozen if rank else new))
    found["doctor"] = caught(lambda: commhooks.doctor(new(), lambda model: None, steps=1 + rank))  # type: ignore
    for name, given in {"no steps": {"steps": 0}, "seconds": {"seconds": -1}, "options": {"powersgd_options": {"x": 1}},
                        "start": {"powersgd_options": {"start_powerSGD_iter": 3}}}.items():  # fmt: skip
        found[f"doctor, {name}"] = caught(lambda given=given: commhooks.doctor(new(), print, **given))  # type: ignore
    found["doctor, no loss"] = caught(lambda: commhooks.doctor(new(), lambda model: None, steps=1))  # type: ignore
    found["cosine"] = caught(_method("sample_cosine", 3 + rank))
    for hook, function in {"bare": commhooks.powerSGD_hook, "bare batched": commhooks.batched_powerSGD_hook}.items():
        found[hook] = caught(_bare(commhooks.PowerSGDState(None, matrix_approximation_rank=1 + rank), function))
    run = Run("powerSGD 2", Situation(attach={"check_every": 1})).train(5)
    saved = run.hook.state_dict("per_rank")
    if rank:
        with torch.no_grad():
            run.module.out.bias[0] += 1
    found["drifted"] = caught(lambda: backward(run.ddp))
    run = Run("powerSGD 2", Situation())
    if rank:
        run.hook.load_state_dict(saved)
    found["loaded on one"] = caught(lambda: backward(run.ddp))
    run = Run("powerSGD 2", Situation())
    run.hook.load_state_dict(saved | {"residual_ranks": [0]})
    found["residual of one"] = caught(lambda: run.train(4).hook.state_dict("mean")["residual"])

    def join() -> None:
        with Join([run.ddp], divide_by_initial_world_size=False):
            backward(run.ddp)

    found["join divided otherwise"] = caught(join)
    return found


def error_cases() -> list[Case]:
    return [Case(1, "wrong usage", wrong_usage, many=True)] + [
        Case(size, "disagreement", disagreement, many=True) for size in (2, 3)
    ]
