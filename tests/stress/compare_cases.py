"""The grid of `compare_versions.py`: every hook in every situation of DDP, every option, every way to save and load."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from compare_observed import Case
from compare_training import (
    ANY,
    ATTACHED,
    BARE,
    BATCHED,
    FIND,
    LOW,
    OF_ATTACHED,
    OF_STATE,
    SMALL_MB,
    STEPS,
    Net,
    Run,
    Situation,
    batch,
    digest,
    through_bytes,
)
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import commhooks

# What there is of other hooks on one rank and on three, and the hooks of which there is everything on three.
FEW = ("one bucket", "buckets", "unused", "scaler")
ON_THREE = ("allreduce", "fp16", "powerSGD 2", "batched", "alternate", "fused", "own", "bare powerSGD")


def _by_option(options: dict[str, Any], situations: tuple[str, ...] = ("one bucket", "buckets")) -> Any:
    return options, situations


OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no warm start": _by_option({"warm_start": False}, ("buckets", "scaler", "mean")),
    "no error feedback": _by_option({"use_error_feedback": False}, ("one bucket", "buckets", "scaler", "per_rank")),
    "cold": _by_option({"warm_start": False, "use_error_feedback": False}),
    "exclude": _by_option({"exclude": ["*.bias", "tr?nk.*", "no_such*"]}, ("buckets", "mean")),
    "exclude all": _by_option({"exclude": ["*"]}),
    "rate 1": _by_option({"min_compression_rate": 1}),
    "rate 5": _by_option({"min_compression_rate": 5}, ("buckets", "mean")),
    "same shape": _by_option({"batch_tensors_with_same_shape": True}, ("one bucket", "buckets", "unused")),
    "epsilon": _by_option({"orthogonalization_epsilon": 1e-8}),
    "seed": _by_option({"random_seed": 7}),
    "stats logged": _by_option({"compression_stats_logging_frequency": 2}),
    "rank 100": _by_option({"matrix_approximation_rank": 100, "min_compression_rate": 0.1}),
    "start 0": _by_option({"start_powerSGD_iter": 0}, ("one bucket", "buckets", "unused", "scaler")),
    "start 1": _by_option({"start_powerSGD_iter": 1}),
    "start 1000": _by_option({"start_powerSGD_iter": 1000}),
}
OPTIONS_OF = ("powerSGD 2", "batched", "fused", "alternate")

SPECIAL: dict[str, tuple[str, Situation, dict[str, Any]]] = {  # hook, situation, options; all on two ranks
    "start 0.5": ("powerSGD 2", Situation(attach={"total_steps": 12}), {"start_powerSGD_iter": 0.5}),
    "start None of 40": ("powerSGD 2", Situation(attach={"total_steps": 40}), {"start_powerSGD_iter": None}),
    "start None": ("powerSGD 2", Situation(), {"start_powerSGD_iter": None}),
    "start never reached": ("powerSGD 2", Situation(attach={"total_steps": 5}), {"start_powerSGD_iter": 20}),
    "save_residual": ("powerSGD 2", Situation(attach={"save_residual": "mean", "strict": False}), {}),
    "loss_scale": ("powerSGD 2", Situation(attach={"loss_scale": lambda: 4.0}), {}),
} | {
    f"{first} and {second}": (hook, Situation(**(one | two)), {})  # type: ignore[arg-type]
    for hook in ("powerSGD 2", "batched", "fused", "alternate", "alternate fused", "state", "own", "fp16")
    for (first, one), (second, two) in [
        (("scaler", {"scaler": True}), (f"fp16 of {hook}", {"attach": {"wrapper": "fp16"}})),
        (("scaler", {"scaler": True}), (f"mean of {hook}", {"resume": "mean"})),
        (("scaler", {"scaler": True}), (f"no_sync of {hook}", {"micro": 2})),
        (("unused", {"ddp": FIND, "unused": "by rank"}), (f"bf16 of {hook}", {"attach": {"wrapper": "bf16"}})),
        (("unused", {"ddp": FIND, "unused": "by all"}), (f"per_rank of {hook}", {"resume": "per_rank"})),
        (("bfloat16", {"dtype": torch.bfloat16}), (f"mean of {hook}", {"resume": "mean"})),
        (("float64", {"dtype": torch.float64}), (f"fp16 of {hook}", {"attach": {"wrapper": "fp16"}})),
        (("kinds", {"kind": "kinds"}), (f"per_rank of {hook}", {"resume": "per_rank"})),
        (("kinds", {"kind": "kinds"}), (f"bf16 of {hook}", {"attach": {"wrapper": "bf16"}})),
        (("tied", {"kind": "tied"}), (f"mean of {hook}", {"resume": "mean"})),
        (("join", {"join": True}), (f"checks of {hook}", {"attach": {"check_every": 2}})),
        (("views", {"ddp": {"gradient_as_bucket_view": True}}), (f"no_sync of {hook}", {"micro": 3})),
        (("one bucket", {"several": False}), (f"drop of {hook}", {"resume": "drop"})),
    ]
}


# ------------------------------------------------------------------------------------------------------------ the cases


def train(hook: str, situation: Situation, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """To the end; with `resume` also saved in the middle and gone on with in a new model and hook."""
    run = Run(hook, situation, options)
    if not situation.resume:
        return run.train(STEPS).result()
    saved = run.train({"mean": 6, "per_rank": 7, "drop": 5}[situation.resume]).save(situation.resume)
    late = {"start_powerSGD_iter": 900} if isinstance(ATTACHED[hook](), commhooks.PowerSGD) else {}
    resumed = Run(hook, situation, (options or {}) | late, seed=5).load(saved)
    return {"saved": saved, "went on": run.train(STEPS).result(), "resumed": resumed.train(STEPS).result()}


def rewind(hook: str) -> dict[str, Any]:
    """The hook takes back its own state of some steps before."""
    run = Run(hook, Situation()).train(5)
    saved = run.save("per_rank")
    return run.train(8).load(saved).train(STEPS).result()


def other_options(before: str, after: str, changes: dict[str, Any], strict: bool, how: dict[str, Any]) -> Any:
    """Saved by one hook, loaded into another, or into one of other options; `how`: arguments of `state_dict`."""
    run = Run(before, Situation()).train(6)
    payload = through_bytes(run.hook.state_dict(**how))
    run.train(7)
    other = Run(after, Situation(**changes), seed=5)
    other.hook.load_state_dict(payload, strict=strict)
    return {"saved": payload, "saver": run.result(), "loaded": other.train(STEPS).result()}


def elastic(hook: str, saved_by: int) -> dict[str, Any]:
    """Of three ranks the first `saved_by` train and save in one payload; all of them go on."""
    group, content = dist.new_group(list(range(saved_by))), [None]
    if dist.get_rank() < saved_by:
        run = Run(hook, Situation(), group=group).train(6)
        content[0] = run.save("per_rank") | {"hook": run.hook.state_dict("per_rank", gather=True)}  # type: ignore
    dist.broadcast_object_list(content)
    return Run(hook, Situation(), seed=5).load(content[0]).train(STEPS).result()  # type: ignore[arg-type]


def watched(hook: str, several: bool) -> dict[str, Any]:
    """With replicas compared and the cosine sampled."""
    run = Run(hook, Situation(several=several, attach={"check_every": 2} if hook != "noop" else {}))
    run.hook.sample_cosine(3)
    found = run.train(8).result()
    run.hook.sample_cosine(None)
    return found | {"after": run.train(STEPS).result()}


def pickled(hook: str, dtype: torch.dtype, attached: bool, steps: int) -> dict[str, Any]:
    """A state in the middle of a training, as users of torch's hooks save it: alone, and with its function."""
    run = Run("state" if attached else hook, Situation(dtype=dtype)).train(steps)
    function, whole, rest = (LOW if "(" in hook else BARE[hook]()[1]), io.BytesIO(), io.BytesIO()
    torch.save({"comm_hook": function, "comm_hook_state": run.state}, whole)
    torch.save(run.save("drop") | {"hook": None}, rest)
    configs = [made() for made in ATTACHED.values() if isinstance(made(), commhooks.HookConfig)]
    return {"state": pickle.dumps(run.state), "whole": whole.getvalue(), "rest": rest.getvalue(),
            "configs": pickle.dumps(configs), "hook": hook, "dtype": str(dtype), "attached": attached}  # fmt: skip


PICKLE_USES = ("own", "whole", "of rank 0", "the other way")


def resume_pickle(ranks: list[dict[str, Any]], use: str) -> dict[str, Any]:
    """Five more steps with a state that `pickled` made, of this rank or of rank 0; "the other way": attached if it was
    bare, and bare if it was attached."""
    own = ranks[0 if use == "of rank 0" else dist.get_rank()]
    attached = own["attached"] != (use == "the other way")
    if use == "whole":
        loaded = torch.load(io.BytesIO(own["whole"]), weights_only=False)
        state, names = loaded["comm_hook_state"], [loaded["comm_hook"].__name__, pickle.loads(own["configs"])]
    else:
        state, names = pickle.loads(own["state"]), []
    first = {key: getattr(state, key) for key in OF_STATE} | {"stats": state.compression_stats()}
    dtype = getattr(torch, own["dtype"].removeprefix("torch."))
    ATTACHED["state"] = lambda: (BATCHED if own["hook"] == "bare batched" else LOW, state)
    run = Run("state" if attached else own["hook"], Situation(dtype=dtype), seed=5, state=state)
    run.load(torch.load(io.BytesIO(own["rest"]), weights_only=True))
    return {"loaded": first, "names": names} | run.train(run.step + 5).result()


def repickled(hook: str) -> dict[str, Any]:
    """Pickled and gone on with in one version; the first run goes on too."""
    run = Run(hook, Situation()).train(6)
    rest, state = run.save("drop"), pickle.loads(pickle.dumps(run.state))
    again = Run(hook, Situation(), seed=5, state=state).load(rest)
    return {"went on": run.train(STEPS).result(), "loaded": again.train(STEPS).result()}


def advised() -> dict[str, Any]:
    """What the doctor reports, times left out."""
    ddp, said = DistributedDataParallel(Net(), bucket_cap_mb=SMALL_MB), []
    before = digest(ddp.module.parameters())

    def batch_fn(model: nn.Module) -> torch.Tensor:
        images, words, labels = batch(0, dist.get_rank(), torch.float32)
        return functional.cross_entropy(model(images, words), labels)

    report = commhooks.doctor(ddp, batch_fn, steps=2, powersgd_ranks=[1, 2, 100], progress=said.append)
    content = report.as_dict()
    kept = ("hook", "hook_options", "bytes_sent", "collectives", "compressed_steps")
    return {
        "candidates": {label: {key: each[key] for key in kept} for label, each in content["candidates"].items()},
        "rest": {key: content[key] for key in ("world_size", "backend", "gradient_bytes", "not_measured")},
        "keys": [sorted(content), sorted(content["link"]), sorted(content["advice"])],
        "said": said,
        "untouched": before == digest(ddp.module.parameters()),
    }


def _fits(hook: str, situation: Situation) -> bool:
    return not (hook == "noop" and "check_every" in situation.attach)


def grid_cases() -> list[Case]:
    cases = []
    for world_size in (1, 2, 3):
        for hook in (*ATTACHED, *BARE):
            chosen = ANY | OF_ATTACHED if hook in ATTACHED else ANY
            everything = world_size == 2 or hook in (ATTACHED if world_size == 1 else ON_THREE)
            for name, situation in chosen.items():
                if _fits(hook, situation) and (everything or name in FEW):
                    cases.append(Case(world_size, f"{hook}, {name}", train, (hook, situation), situation.quiet))
    for hook in OPTIONS_OF:
        for option, (changes, situations) in OPTIONS.items():
            for name in situations:
                cold = hook == "alternate" and not changes.get("warm_start", True)
                if not cold and not (hook == "batched" and "exclude" in changes):
                    arguments = (hook, (ANY | OF_ATTACHED)[name], changes)
                    cases.append(Case(2, f"{hook}, {option}, {name}", train, arguments))
    cases += [Case(2, name, train, arguments) for name, arguments in SPECIAL.items()]
    for world_size in (1, 2, 3):
        for hook in ("powerSGD 2", "batched", "alternate", "fused", "state", "own", "fp16"):
            cases.append(Case(world_size, f"{hook}, rewind", rewind, (hook,)))
    for hook in ("powerSGD 2", "batched", "alternate", "allreduce", "bf16", "fused", "noop"):
        for several in (False, True):
            cases.append(Case(2, f"{hook}, watched{', buckets' * several}", watched, (hook, several)))
    for hook in ("powerSGD 2", "batched", "alternate"):
        cases += [Case(3, f"{hook}, saved by {n}", elastic, (hook, n)) for n in (1, 2)]
    for before, after in [
        ("powerSGD 2", "powerSGD 4"),
        ("powerSGD 4", "powerSGD 1"),
        ("alternate", "powerSGD 2"),
        ("powerSGD 2", "alternate"),
        ("powerSGD 2", "fused"),
        ("fused", "alternate fused"),
    ]:
        arguments = (before, after, {}, True, {"residual": "per_rank"})
        cases.append(Case(2, f"{before} loaded by {after}", other_options, arguments))
    for before, after in [("powerSGD 2", "batched"), ("batched", "powerSGD 2"), ("fp16", "powerSGD 2"),
                          ("powerSGD 2", "own"), ("own", "allreduce")]:  # fmt: skip
        cases.append(Case(2, f"{before} loaded by {after}", other_options, (before, after, {}, False, {})))
    other_runs: dict[str, dict[str, Any]] = {
        "bf16": {"attach": {"wrapper": "bf16"}},
        "one bucket": {"several": False},
        "float64": {"dtype": torch.float64},
        "bfloat16": {"dtype": torch.bfloat16},
        "tied": {"kind": "tied"},
        "kinds": {"kind": "kinds"},
        "find": {"ddp": FIND},
    }
    for name, changes in other_runs.items():
        for hook in ("powerSGD 2", "batched"):
            arguments = (hook, hook, changes, False, {"residual": "mean"})
            cases.append(Case(2, f"{hook} loaded with {name}", other_options, arguments))
    for name, how in {"gathered": {"gather": True}, "alone": {"residual": "mean", "joint": False}}.items():
        for hook in ("powerSGD 2", "batched", "alternate"):
            cases.append(Case(2, f"{hook} saved {name}", other_options, (hook, hook, {}, True, how)))
    cases += [Case(2, f"{hook}, pickled", repickled, (hook,)) for hook in BARE if BARE[hook]()[0] is not None]
    cases.append(Case(2, "doctor", advised))
    for hook in ("bare powerSGD", "bare alternate", "bare batched"):
        for dtype in (torch.float32, torch.float64):
            cases.append(Case(2, f"{hook} {dtype}", pickled, (hook, dtype, False, 7), pickles=True))
    for hook, steps in [("bare powerSGD", 2), ("bare alternate", 6), ("bare bf16(powerSGD)", 7), ("bare fused", 7)]:
        cases.append(Case(2, f"{hook} at {steps}", pickled, (hook, torch.float32, False, steps), pickles=True))
    cases.append(Case(2, "attached", pickled, ("bare powerSGD", torch.float32, True, 7), pickles=True))
    return cases
