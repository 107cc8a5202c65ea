"""A run that has not used its hook ends with one warning on one rank, and never a wrong one."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support import warm
from tests.support.ddp_steps import backward, log_lines, mlp, wrap
from tests.support.kinds import KINDS
from tests.support.sharded import attached, random_gradients
from tests.support.sharded import backward as sharded_backward

STEPS = 3
NOT_BEGUN = (
    "commhooks: hook {!r} has compressed nothing in 3 backward passes: it begins at step {}. Set {}"
    " to a smaller "
)
NOTHING = (
    "commhooks: hook {!r} has compressed nothing in 3 backward passes: it compresses no parameter"
    " of this model. print(hook.plan()) gives the reasons."
)
UNUSED: dict[str, tuple[Any, dict[str, Any] | None, str]] = {
    "powerSGD": (
        "powerSGD",
        None,
        NOT_BEGUN.format("powerSGD", 100, "start_powerSGD_iter") + "number.",
    ),
    "int8": (
        "int8",
        {"start_iter": 3},
        NOT_BEGUN.format("int8_compress", 3, "start_iter") + "number.",
    ),
    "a compressor of one's own": (
        "examples.random_k:RandomKCompressor",
        {"start_iter": 3},
        NOT_BEGUN.format("random_k", 3, "start_iter") + "number.",
    ),
    "auto": (
        "auto",
        None,
        NOT_BEGUN.format("auto", 10, "measure_steps") + "number, or name the hook.",
    ),
    "diloco": (
        "diloco",
        {"sync_every": 4},
        (
            "commhooks: hook 'diloco' has averaged no weights in 3 backward passes: it begins at"
            " step 4. Set start_iter to a smaller number, or sync_every."
        ),
    ),
    "powerSGD, no large matrix": (
        "powerSGD",
        {"start_powerSGD_iter": 1, "min_compression_rate": 1000},
        NOTHING.format("powerSGD"),
    ),
    "int8, all excluded": (
        "int8",
        {"start_iter": 0, "exclude": ["*"]},
        NOTHING.format("int8_compress"),
    ),
    "int8, begun": ("int8", {"start_iter": 2}, ""),
    "auto, decided": (KINDS["auto, chooses int8"].hook, None, ""),
    "local_sgd, averaged": ("local_sgd", {"sync_every": 3}, ""),
    "allreduce": ("allreduce", None, ""),
    "noop": ("noop", None, ""),
    "none": (None, None, ""),
}


def _trained(hook: Any, options: dict[str, Any] | None) -> list[str]:
    with log_lines("commhooks.hook.unused") as lines:
        ddp = wrap(mlp())
        attached = commhooks.attach(ddp, hook, hook_options=options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(STEPS):
            backward(ddp, step)
            optimizer.step()
        assert not lines
        attached.close()
        attached.close()
    return lines


@pytest.mark.parametrize("name", UNUSED)
def test_a_run_that_has_not_used_its_hook_is_warned_about(run_ranks: Any, name: str) -> None:
    hook, options, expected = UNUSED[name]
    on_0, on_1 = run_ranks(_trained, hook, options)
    assert on_0 == ([expected] if expected else []) and on_1 == []


def _not_called(way: str, hook: str) -> list[str]:
    with log_lines("commhooks.hook.unused") as lines:
        ddp = wrap(mlp())
        attached = commhooks.attach(ddp, hook)
        model: torch.nn.Module = wrap(ddp.module) if way == "another wrapper" else ddp
        if way == "evaluated":
            with torch.no_grad():
                ddp(torch.randn(8, 24))
        elif way == "replaced":
            ddp = wrap(ddp.module)
            attached = commhooks.attach(ddp, "bf16_compress")
            backward(ddp, 0)
        else:
            for step in range(STEPS):
                with ddp.no_sync():
                    backward(model, step)
        attached.close()
    assert not any(p._post_accumulate_grad_hooks for p in ddp.parameters())  # type: ignore[attr-defined]
    return lines


NOT_CALLED = [(way, "powerSGD") for way in ("another wrapper", "no_sync", "evaluated", "replaced")]


@pytest.mark.parametrize(
    ("way", "hook"), [*NOT_CALLED, ("no_sync", "tests.hook.test_unused:users_hook")]
)
def test_a_hook_that_was_never_called_is_warned_about(run_ranks: Any, way: str, hook: str) -> None:
    on_0, on_1 = run_ranks(_not_called, way, hook)
    called = (
        f"commhooks: hook {hook!r} was never called in 3 backward passes of its model, and has"
        " averaged nothing. "
    )
    assert [line.startswith(called) for line in on_0] == (
        [True] if way in ("another wrapper", "no_sync") else []
    )
    assert on_1 == []


def _replaced() -> list[str]:
    """Attach a hook that has not begun, then another one that fails in its first pass."""
    with log_lines("commhooks.hook.unused") as lines:
        model = mlp()
        replaced = commhooks.attach(first := wrap(model), "powerSGD")
        backward(first, 0)
        failed = commhooks.attach(second := wrap(model), "powerSGD", check_every=1)
        with torch.no_grad():
            model[0].weight.add_(torch.distributed.get_rank())
        with pytest.raises(commhooks.HookRunError, match="drifted apart"):
            backward(second, 0)
        replaced.close()
        failed.close()
    return lines


def test_a_hook_that_was_replaced_or_has_failed_is_not_warned_about(run_ranks: Any) -> None:
    assert run_ranks(_replaced) == [[], []]


def users_hook(state: Any, bucket: Any) -> Any:
    return commhooks.allreduce_hook(state, bucket)


def _silent() -> list[str]:
    """Run what must stay silent: an exception, a fork, another group, a quiet hook, a short run."""
    with log_lines("commhooks.hook.unused") as lines:

        def trained(**attach: Any) -> tuple[DistributedDataParallel, commhooks.CommHook]:
            ddp = wrap(mlp())
            hook = commhooks.attach(ddp, "powerSGD", **attach)
            backward(ddp, 0)
            return ddp, hook

        ddp, hook = trained()
        hook.quiet()
        hook.close()
        ddp, hook = trained()
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            hook.close()
        ddp, hook = trained()
        child = os.fork()
        if child == 0:
            del ddp, hook
            os._exit(len(lines))
        assert os.waitpid(child, 0)[1] == 0
        assert not lines
        hook.close()
        assert len(lines) == (torch.distributed.get_rank() == 0)
        hook.close()
        ddp, hook = trained(total_steps=1)  # warned of at the beginning
        hook.close()
        del ddp, hook
    return lines


def test_no_warning_is_wrong_or_repeated(run_ranks: Any) -> None:
    on_0, on_1 = run_ranks(_silent)
    assert [line.split(":")[1] for line in on_0] == [
        " hook 'powerSGD' has compressed nothing in 1 backward passes",
        (
            " hook 'powerSGD' begins at step 1, but this run ends at step 1, so that it has no"
            " effect. Set start_powerSGD_iter to a smaller number."
        ),
    ]
    assert on_1 == []


def _of_shards() -> list[list[str]]:
    results = []
    for end in ("close", "detach"):
        with log_lines("commhooks.hook.unused") as lines:
            model, hook = attached(2, 2, commhooks.PowerSGD(start_powerSGD_iter=9))
            sharded_backward(model, random_gradients(0))
            getattr(hook, end)()
            hook.close()
        results.append(lines)
    return results


def test_shards_are_warned_about_and_a_detached_hook_is_not(run_ranks: Any) -> None:
    (closed, detached), *others = run_ranks(_of_shards, world_size=4)
    assert (
        len(closed) == 1
        and "has compressed nothing in 1 backward passes: it begins at step 9." in closed[0]
    )
    assert detached == [] and others == [[[], []]] * 3


SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import commhooks
rank, folder, end = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

def train(module, **options):
    model = DistributedDataParallel(module)
    hook = commhooks.attach(model, "powerSGD", hook_options=options)
    for step in range(2):
        model(torch.randn(4, 64)).square().mean().backward()
    return model, hook

if end == "the model is gone":
    train(torch.nn.Linear(64, 64))
elif end == "replaced":
    train(torch.nn.Linear(64, 64))
    train(torch.nn.Linear(64, 64), start_powerSGD_iter=0)
else:
    kept = train(torch.nn.Linear(64, 64))
if end == "exception":
    raise ValueError("an error of the user")
dist.barrier()
dist.destroy_process_group()
"""
WARNS = {"end": True, "the model is gone": True, "exception": False, "replaced": False}


@pytest.mark.parametrize("end", WARNS)
def test_the_warning_comes_at_the_end_of_the_process_too(tmp_path: Path, end: str) -> None:
    ranks = [
        subprocess.Popen(
            [warm.python(), "-c", SCRIPT, str(rank), str(tmp_path), end],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    on_0, on_1 = (process.communicate(timeout=120)[1] for process in ranks)
    assert (
        on_0.count("hook 'powerSGD' has compressed nothing in 2 backward passes") == WARNS[end]
    ), on_0
    assert "compressed nothing" not in on_1 and ("an error of the user" in on_0) == (
        end == "exception"
    )
