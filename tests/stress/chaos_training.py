"""A training that dies: chaos_training.py FRONT TOPOLOGY HOOK STEPS FOLDER, under torchrun; started
by chaos_runs.py.

It writes final-RANK.pt, the weights and statistics of the hook, beside the notes of chaos_watch.py.
"""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import commhooks
from commhooks.registry import register_compressor
from tests.stress import chaos_fronts, chaos_trainers
from tests.stress.chaos_cases import Combination
from tests.stress.chaos_fronts import Job, Trained
from tests.stress.chaos_watch import Watch

START = 3  # steps of plain averaging, so that a resume in the middle of them is seen, too


def _auto() -> commhooks.HookConfig:
    """Becomes int8 at step 12, and has been tried at step 20."""
    from tests.support.prescribed_auto import PrescribedAuto, PrescribedAutoCompressor

    register_compressor(PrescribedAutoCompressor)
    return PrescribedAuto(measure_steps=12)


def _random_k() -> commhooks.HookConfig:
    from examples.random_k import RandomK, RandomKCompressor

    # again, in workers that forget what a test has registered
    register_compressor(RandomKCompressor)
    return RandomK(share=0.2, start_iter=START)


HOOKS: dict[str, Callable[[], commhooks.HookConfig]] = {
    "powerSGD": lambda: commhooks.PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=START),
    "int8": lambda: commhooks.Int8Compress(block_size=32, start_iter=START),
    "int4": lambda: commhooks.Int4Compress(block_size=32, start_iter=START),
    "auto": _auto,
    # Rounds of four steps, so that most saves end one early, while a half of the weights travels.
    "diloco": lambda: commhooks.DiLoCo(sync_every=4, fragments=2, delay=1, outer_momentum=0.3),
    "random_k": _random_k,
}
FRONTS: dict[str, Callable[[Job, Watch], Trained]] = {
    "plain": chaos_fronts.plain,
    "fabric": chaos_fronts.fabric,
    "lightning": chaos_trainers.lightning,
    "accelerate": chaos_fronts.accelerate,
    "trainer": chaos_trainers.trainer,
}


def train(combination: Combination, folder: Path, watch: Watch) -> Trained:
    job = Job(folder, combination.topology, HOOKS[combination.hook](), combination.steps)
    return FRONTS[combination.front](job, watch)


def main(combination: Combination, folder: Path) -> None:
    torch.set_num_threads(1)
    watch = Watch.of_this_process(folder)
    watch.at("start", 0)
    try:
        weights, hook = train(combination, folder, watch)
    except BaseException as error:
        watch.files_may_grow()
        watch.note("error", type=type(error).__name__, text=str(error))
        raise
    watch.phase = "end"
    torch.save({"weights": weights, "stats": hook.stats()}, folder / f"final-{watch.rank}.pt")
    watch.note("end")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    status = 1
    try:
        main(Combination(*sys.argv[1:4], int(sys.argv[4])), Path(sys.argv[5]))
        status = 0
    except BaseException:
        traceback.print_exc()
    # gloo sometimes aborts while the interpreter ends, with a hook or without: end it here.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
