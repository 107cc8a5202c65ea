"""The grid of `compare_versions.py`: every kind of hook in every situation, options, and states of
others.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import commhooks
from commhooks.ddp_comm_hooks import default_hooks, powerSGD_hook
from tests.stress.compare_sharded import SHARDED, train_sharded
from tests.stress.compare_training import STEPS, Run, Situation, through_bytes
from tests.support.kernels import computing_with
from tests.support.kinds import KINDS, START

LOW, BATCHED = powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook


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


def _state(**options: Any) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=START, **options
    )


# Arguments of `attach`. Those of auto look behind the public names of one version.
OF_KINDS: dict[str, Callable[[], Any]] = {
    name: functools.partial(
        dict, hook=kind.hook, hook_options=kind.options or None, wrapper=kind.wrapper
    )
    for name, kind in KINDS.items()
    if not kind.hook.startswith("tests.")
}
ATTACHED: dict[str, Callable[[], Any]] = OF_KINDS | {
    "noop": lambda: {"hook": "noop"},
    "auto, before its trials": lambda: {"hook": "auto", "hook_options": {"measure_steps": 1000}},
    "own": lambda: {"hook": own_hook, "hook_state": Calls()},
    "state": lambda: {"hook": LOW, "hook_state": _state()},
}
# State and function for `register_comm_hook`.
BARE: dict[str, Callable[[], Any]] = {
    "bare allreduce": lambda: (None, default_hooks.allreduce_hook),
    "bare fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "bare powerSGD": lambda: (_state(), LOW),
    "bare batched": lambda: (_state(), BATCHED),
    "bare native": lambda: (_state(), LOW),
    "bare bf16(powerSGD)": lambda: (_state(), default_hooks.bf16_compress_wrapper(LOW)),
    "bare fp16(batched)": lambda: (_state(), default_hooks.fp16_compress_wrapper(BATCHED)),
}
BARE_WITH_TORCH = ("bare powerSGD", "bare batched")
FIND = {"find_unused_parameters": True}
OF_ALL = {
    "one bucket": Situation(several=False),
    "unused, scaler": Situation(ddp=FIND, unused="by rank", scaler=True),
    "scaler": Situation(scaler=True),
    "bfloat16, static graph, tied": Situation(
        dtype=torch.bfloat16, ddp={"static_graph": True}, kind="tied"
    ),
}
OF_ATTACHED = OF_ALL | {
    "buckets": Situation(quiet=True),
    "float64, views, no_sync": Situation(
        dtype=torch.float64, ddp={"gradient_as_bucket_view": True}, micro=3
    ),
    "unused by all": Situation(ddp=FIND | {"skip_all_reduce_unused_params": True}, unused="by all"),
    "join": Situation(join=True),
    "sparse": Situation(kind="sparse"),
    "odd": Situation(kind="odd"),
    "per_rank": Situation(resume="per_rank"),
    "mean": Situation(resume="mean"),
}
SAVED_BY_2 = Situation(resume="per_rank", savers=2)
WATCHED = Situation(attach={"check_every": 2})
NODES = {"ranks_per_node": 2}
OF_NODES = {
    "nodes, scaler": Situation(attach=NODES, scaler=True),
    "nodes, mean": Situation(attach=NODES, resume="mean"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "cold": {"warm_start": False, "use_error_feedback": False},
    "exclude": {"exclude": ["*.bias", "tr?nk.*", "no_such*"]},
    "rate 5": {"min_compression_rate": 5},
    "epsilon": {"orthogonalization_epsilon": 1e-8},
    "seed, stats logged": {"random_seed": 7, "compression_stats_logging_frequency": 2},
    "rank 100": {"matrix_approximation_rank": 100, "min_compression_rate": 0.1},
    "same shape": {"batch_tensors_with_same_shape": True},
    "start 0": {"start_powerSGD_iter": 0},
    "start 0.5": {"start_powerSGD_iter": 0.5},
    "start None": {"start_powerSGD_iter": None},
}
# Saved by one, loaded by another, in another situation.
CROSSED = [
    ("powerSGD", "batched", "buckets"),
    ("batched", "powerSGD", "buckets"),
    ("fp16", "own", "buckets"),
    ("own", "powerSGD", "buckets"),
    ("int8, native", "int4, native", "buckets"),
    ("int8, torch", "int8, native", "odd"),
    ("powerSGD", "powerSGD", "float64, views, no_sync"),
    ("batched", "batched", "one bucket"),
]


ROUND = {"sync_every": 3, "outer_lr": 0.7, "outer_momentum": 0.9}
LOCAL: dict[str, dict[str, Any]] = {
    "float32": ROUND | {"wire": "float32"},
    "int8": ROUND | {"wire": "int8"},
    "int4": ROUND | {"wire": "int4"},
    "int8, torch": ROUND | {"wire": "int8"},
    "int4, torch": ROUND | {"wire": "int4"},
    "plain mean": {"sync_every": 3, "wire": "float32"},
    "exclude": ROUND | {"wire": "int8", "exclude": ["*.bias", "words*"]},
    "start 2": ROUND | {"start_iter": 2},
    "fragments": ROUND | {"fragments": 3, "wire": "int4"},
    "fragments, float32": ROUND | {"sync_every": 4, "fragments": 4, "wire": "float32"},
    "delay": ROUND | {"sync_every": 4, "delay": 2, "wire": "int8"},
    "delay, float32": ROUND | {"sync_every": 4, "delay": 3, "wire": "float32"},
    "fragments, delay": ROUND | {"sync_every": 4, "fragments": 2, "delay": 1, "wire": "int4"},
}
LOCAL_IN_MANY = ("float32", "int4", "fragments, delay")
LOCAL_SITUATIONS = {
    "buckets": Situation(quiet=True),
    "mean": Situation(resume="mean"),
    "scaler": Situation(scaler=True, resume="per_rank"),
    "not finite": Situation(spoilt=True),
    "norm": Situation(kind="norm", resume="per_rank"),
    "bfloat16, one bucket": Situation(several=False, dtype=torch.bfloat16),
    "float64, views, no_sync": OF_ATTACHED["float64, views, no_sync"],
    "sparse": Situation(kind="sparse"),
    "unused": Situation(ddp=FIND, unused="by rank"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """`function(*arguments)` on that many ranks."""

    world_size: int
    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    quiet: bool = False
    kernel: str = "native"

    @property
    def full_name(self) -> str:
        return f"{self.world_size} ranks: {self.name}"

    def run(self) -> Any:
        with computing_with(self.kernel):
            return self.function(*self.arguments)


def train(make: Callable[[], Any], situation: Situation) -> dict[str, Any]:
    """To the end; with `resume` also saved in the middle and gone on with in a new model and
    hook.
    """
    if not situation.resume:
        return Run(make(), situation).train(STEPS).result()
    savers, content = situation.savers or dist.get_world_size(), [None]
    group = dist.new_group(list(range(savers))) if situation.savers else None
    found: dict[str, Any] = {}
    if dist.get_rank() < savers:
        run = Run(make(), situation, group=group).train(5)
        saved = run.save(situation.resume, gather=bool(situation.savers))
        content, found = [saved], {"saved": saved, "went on": run.train(STEPS).result()}
    if situation.savers:
        dist.broadcast_object_list(content)
    return found | {
        "resumed": Run(make(), situation, seed=5).load(content[0]).train(STEPS).result()
    }  # type: ignore


def crossed(before: str, after: str, situation: str) -> dict[str, Any]:
    """What is saved by one hook is offered to another."""
    with computing_with(KINDS[before].kernel if before in KINDS else "native"):
        payload = through_bytes(
            Run(ATTACHED[before](), OF_ATTACHED["buckets"]).train(5).hook.state_dict("mean")
        )
    other = Run(ATTACHED[after](), OF_ATTACHED[situation], seed=5)
    other.hook.load_state_dict(payload, strict=False)
    return {"saved": payload, "loaded": other.train(STEPS).result()}


def _local_cases() -> list[Case]:
    """Hooks that average weights, on 1 to 4 ranks."""
    cases = []
    for kind, options in LOCAL.items():
        chosen = [
            (2, "per_rank", Situation(resume="per_rank")),
            (3, "per_rank", Situation(resume="per_rank")),
        ]
        if kind in LOCAL_IN_MANY:
            chosen += [(2, name, each) for name, each in LOCAL_SITUATIONS.items()]
            chosen.append((1, "one bucket", Situation(several=False)))
            chosen.append((3, "saved by 2 ranks", Situation(resume="mean", savers=2)))
            chosen.append((4, "nodes", Situation(attach=NODES, resume="per_rank")))
        make = functools.partial(dict, hook="diloco", hook_options=options)
        delayed = "delay" in options
        for world_size, name, situation in chosen:
            situation = dataclasses.replace(situation, local="delayed" if delayed else "at once")
            if delayed:
                # lines of a thread come in any order
                situation = dataclasses.replace(situation, quiet=True)
            kernel = "torch" if "torch" in kind else "native"
            cases.append(
                Case(
                    world_size,
                    f"diloco {kind}, {name}",
                    train,
                    (make, situation),
                    situation.quiet,
                    kernel,
                )
            )
    make = functools.partial(dict, hook="local_sgd", hook_options={"sync_every": 3})
    cases.append(
        Case(2, "diloco as local_sgd", train, (make, Situation(local="at once", resume="per_rank")))
    )
    return cases


@functools.cache
def all_cases() -> dict[str, Case]:
    """By full name, in the order in which they run."""
    cases = []
    for hook, make in (ATTACHED | BARE).items():
        chosen = [
            (2, name, each) for name, each in (OF_ALL if hook in BARE else OF_ATTACHED).items()
        ]
        chosen.append((1, "one bucket", OF_ALL["one bucket"]))
        if hook in OF_KINDS:
            chosen += [(2, "watched", WATCHED), (3, "saved by 2 ranks", SAVED_BY_2)]
        if hook in OF_KINDS and not KINDS[hook].layouts_matter:
            chosen += [(4, name, each) for name, each in OF_NODES.items()]
        for world_size, name, situation in chosen:
            kernel = (
                KINDS[hook].kernel
                if hook in KINDS
                else "torch"
                if hook in BARE_WITH_TORCH
                else "native"
            )
            cases.append(
                Case(
                    world_size, f"{hook}, {name}", train, (make, situation), situation.quiet, kernel
                )
            )
    for name, options in OPTIONS.items():
        make = functools.partial(
            dict, hook="powerSGD", hook_options=KINDS["powerSGD"].options | options
        )
        situation = Situation(attach={"total_steps": 12}, resume="per_rank")
        cases.append(Case(2, f"powerSGD, {name}", train, (make, situation)))
    cases += [
        Case(2, f"{a} loaded by {b}, {situation}", crossed, (a, b, situation))
        for a, b, situation in CROSSED
    ]
    cases += _local_cases()
    for name, options in SHARDED.items():
        hook = name.partition(",")[0]
        cases += [
            Case(4, f"fully_shard {name}, {a} x {b}", train_sharded, (a, b, hook, options))
            for a, b in ((2, 2), (4, 1))
        ]
    assert len({case.full_name for case in cases}) == len(cases)
    return {case.full_name: case for case in sorted(cases, key=lambda case: case.world_size)}
