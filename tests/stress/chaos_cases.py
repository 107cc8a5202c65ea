"""`make chaos` draws from these front ends, topologies, hooks and deaths; some are left out."""

import itertools
import math
import random
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

STEPS = 30
SAVE_EVERY = 5
GROUP_TIMEOUT_S = 20  # of the process group; ranks that start on a busy machine need some of it

HOOKS = ("powerSGD", "int8", "int4", "auto", "diloco", "random_k")
"""`auto` with prescribed times, so that its choice is the same every time; `diloco` with fragments
and a delay; `random_k` is a user's compressor. chaos_training.py builds them.
"""

TOPOLOGIES = {"ddp": 2, "nodes": 4, "fsdp2": 4}
"""Ranks: DDP; DDP with `ranks_per_node=2`; two replicas of two shards."""

FRONTS = ("plain", "fabric", "lightning", "accelerate", "trainer")
"""chaos_fronts.py and chaos_trainers.py build them."""

DEATHS = {
    "one": "SIGKILL of one rank",
    "all": "SIGKILL of torchrun and all ranks",
    "sigterm": "SIGTERM to torchrun, which passes it on to all ranks",
    "save": "a rank is gone when a file of a checkpoint is written in part",
    "full": "the disk is full during a save",
    "truncated": "SIGKILL of all, and a file of the newest checkpoint is cut off",
}
COMMAND_AGAIN = ("all", "sigterm", "truncated")
"""Where torchrun ends too: the same command is given again. After the others, torchrun restarts the
ranks.
"""

MOMENTS = {
    "one": ("anytime", "anytime", "backward", "between", "start"),
    "all": ("anytime", "anytime", "backward", "between"),
    "sigterm": ("anytime", "anytime", "backward", "between"),
    "save": ("saving",),
    "full": ("saving",),
    "truncated": ("between",),
}
"""`start`: before the ranks have met. `backward`: between the hook calls of two buckets. `between`:
two steps. `saving`: in a file, wherever its size reaches a limit. `anytime`: a random time after
the beginning of a step.
"""


@dataclass(frozen=True)
class Combination:
    """What trains. Two runs of a combination that are left alone end with the same bits."""

    front: str
    topology: str
    hook: str
    steps: int = STEPS

    @property
    def ranks(self) -> int:
        return TOPOLOGIES[self.topology]

    def __str__(self) -> str:
        return f"{self.front} {self.topology} {self.hook}"


def left_out(combination: Combination) -> str:
    """Why a combination does not exist; "" if it does."""
    if combination.front == "fabric" and combination.topology == "fsdp2":
        return "Fabric has a strategy with a hook for DDP only"
    return ""


@dataclass(frozen=True)
class Death:
    """How and when a training ends before its end."""

    kind: str
    moment: str
    step: int
    """It is the first step at which that moment comes."""
    rank: int = 0
    """That comes to this moment. With `one` and `save` it is the one that dies; `full` is for all
    ranks.
    """
    delay_s: float = 0.0
    """`anytime`: so long after the step has begun."""
    file_bytes: int = 0
    """`saving`: a file that grows beyond it ends the rank, or meets the error of a full disk."""
    pick: int = 0
    """`truncated`: of the files of the checkpoint that hold the hook's state, this one (modulo
    their number).
    """
    issued: str = ""
    """Not before this message has been sent, where a thread of the hook sends."""

    def __str__(self) -> str:
        return f"{self.kind} {self.moment}" + (
            "" if self.moment == "start" else f" at step {self.step}"
        )


@dataclass(frozen=True)
class Case:
    combination: Combination
    death: Death

    def __str__(self) -> str:
        return f"{self.combination}: {self.death}"


def combinations(
    fronts: Collection[str], topologies: Collection[str], hooks: Collection[str]
) -> list[Combination]:
    made = itertools.starmap(Combination, itertools.product(fronts, topologies, hooks))
    return [case for case in made if not left_out(case)]


def draw(
    runs: int,
    seed: int,
    fronts: Collection[str],
    topologies: Collection[str],
    hooks: Collection[str],
    deaths: Collection[str],
) -> list[Case]:
    """The same cases for the same arguments. Rare combinations are as likely as others within their
    front end and topology.
    """
    generator = random.Random(seed)
    possible = combinations(fronts, topologies, hooks)
    cases = []
    for _ in range(runs):
        of = possible
        for name in ("front", "topology", "hook"):
            value = generator.choice(sorted({getattr(case, name) for case in of}))
            of = [case for case in of if getattr(case, name) == value]
        cases.append(Case(of[0], _death(generator.choice(list(deaths)), of[0], generator)))
    return cases


def _death(kind: str, combination: Combination, generator: random.Random) -> Death:
    moment = generator.choice(MOMENTS[kind])
    rank = generator.randrange(combination.ranks)
    # Steps are to come after it; where the newest checkpoint is damaged, there must be one before.
    step = generator.randrange(2 * SAVE_EVERY + 1 if kind == "truncated" else 0, 2 * STEPS // 3)
    if moment == "saving" and combination.topology != "fsdp2":
        rank = 0  # the others write little or nothing
    return Death(
        kind,
        moment,
        0 if moment == "start" else step,
        rank,
        delay_s=round(generator.uniform(0, 0.05), 4),
        file_bytes=round(math.exp(generator.uniform(math.log(300), math.log(20_000)))),
        pick=generator.randrange(1000),
    )


# ---- checkpoints ---------------------------------------------------------------------------------


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a training from which it can go on, oldest first: files, or folders.

    Most front ends give a checkpoint its name when it is complete. Two write into its folder from
    the beginning: transformers' Trainer, whose last file is `trainer_state.json`, and Lightning's
    strategy for FSDP2, where the hook comes last, and of it `.metadata`.
    """
    paths = [*folder.glob("step_??"), *folder.glob("step_??.pt"), *folder.glob("step=??.ckpt")]
    paths = [
        path
        for path in paths
        if path.is_file() or path.suffix == "" or (path / HOOK_METADATA).exists()
    ]
    paths += [state.parent for state in folder.glob("checkpoint-*/trainer_state.json")]
    return sorted(paths, key=step_of)


HOOK_METADATA = Path("commhooks", ".metadata")


def step_of(checkpoint: Path) -> int:
    return int("".join(filter(str.isdigit, checkpoint.name)))


def files_with_the_hook(checkpoint: Path) -> list[Path]:
    """Return the files that hold the hook's state, or all where it is kept with the model."""
    if checkpoint.is_file():
        return [checkpoint]
    files = sorted(
        path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size > 1
    )
    of_hook = [path for path in files if "hook" in str(path.relative_to(checkpoint))]
    return of_hook or files
