"""All ranks compute with one kernel: the fast one if all of them have it. A line says what is
missing.
"""

import json
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import commhooks
from commhooks.compressors.powersgd.compressor import PowerSGDCompressor
from commhooks.engine.kernel_choice import KernelChoice, KernelSupport, choose
from tests.support.ddp_steps import log_lines, mlp, train, wrap
from tests.support.inside import session_of

WIDE, NARROW = "wide", "narrow"
ALIKE = "torch 2, a processor, 1 thread"


def chosen(*supports: KernelSupport) -> KernelChoice:
    (choice,) = {choose(supports, rank, commhooks.AttachError) for rank in range(len(supports))}
    return choice


def test_all_ranks_take_a_kernel_that_all_have() -> None:
    fast, plain = KernelSupport(WIDE, arithmetic=ALIKE), KernelSupport(arithmetic=ALIKE)
    assert chosen(fast, fast, fast) == KernelChoice(True)
    assert chosen(plain, plain) == KernelChoice()
    assert chosen(plain, fast) == KernelChoice()
    assert chosen(fast, plain) == KernelChoice(
        False,
        f"the ranks' kernels differ: ranks [0]: native wide ({ALIKE}); ranks [1]: torch ({ALIKE})",
    )
    without = KernelSupport(missing="install it", arithmetic=ALIKE)
    assert chosen(without) == KernelChoice(False, "install it")
    assert chosen(fast, without, fast, without) == KernelChoice(False, "ranks [1, 3]: install it")
    other = KernelSupport(NARROW, arithmetic="another processor")
    assert chosen(fast, other) == KernelChoice(
        False,
        f"the ranks' kernels differ: ranks [0]: native wide ({ALIKE}); ranks [1]: native narrow"
        " (another processor)",
        f"ranks [0]: {ALIKE}; ranks [1]: another processor",
    )


def test_ranks_that_cannot_run_the_hook_are_named() -> None:
    one, unable = KernelSupport(WIDE), KernelSupport(cannot="no disk")
    with pytest.raises(commhooks.HookRunError, match=r"ranks \[1, 2\] of 3 cannot run .*: no disk"):
        choose([one, unable, unable], 0, commhooks.HookRunError)
    with pytest.raises(commhooks.HookConfigError, match="^no space$"):
        choose([unable, KernelSupport(cannot="no space")], 1, commhooks.AttachError)


def test_an_offer_survives_sending() -> None:
    support = KernelSupport(WIDE, "it is \u201cmissing\u201d\n", ALIKE)
    arrived = KernelSupport(*json.loads(json.dumps(support)))
    assert arrived == support and arrived.key == support.key
    others = KernelSupport(), KernelSupport(WIDE), KernelSupport(NARROW), KernelSupport(missing="x")
    assert len({offer.key for offer in (support, *others)}) == 5


class Picky(PowerSGDCompressor):
    """Has a kernel of its own for float32 only."""

    def native_build(self, device: torch.device, dtype: torch.dtype) -> str:
        return WIDE if dtype == torch.float32 else ""


def test_a_kernel_must_fit_every_dtype() -> None:
    compressor = Picky(commhooks.PowerSGD(start_powerSGD_iter=0))
    cpu = torch.device("cpu")
    assert KernelSupport.of(compressor, cpu, [torch.float32]).build == WIDE
    assert KernelSupport.of(compressor, cpu, [torch.float32, torch.float64]).build == ""
    assert KernelSupport.of(compressor, cpu, [torch.float64]).arithmetic.startswith(
        f"torch {torch.__version__}, "
    )


# ---- ranks on different machines -----------------------------------------------------------------


def _on_other_machines(hook: str, bare: bool, check_every: int | None) -> list[str]:
    """The warnings of a run in which each rank has a processor of its own."""
    machine = mock.patch(
        "commhooks.engine.kernel_choice.arithmetic_of", lambda _: f"processor {dist.get_rank()}"
    )
    with machine, log_lines() as lines:
        ddp = wrap(mlp())
        if bare:
            ddp.register_comm_hook(
                commhooks.PowerSGDState(None, start_powerSGD_iter=1), commhooks.powerSGD_hook
            )
        else:
            commhooks.attach(ddp, hook, check_every=check_every)
        train(ddp, 3)
    return [line for line in lines if "drift" in line]


@pytest.mark.parametrize(
    ("hook", "bare", "check_every", "warns"),
    [
        ("powerSGD", False, None, True),
        ("powerSGD", True, None, True),
        ("powerSGD", False, 2, False),
        ("fp16", False, None, False),
        ("int8", False, None, False),  # no sum is computed twice
    ],
)
def test_different_machines_are_warned_about(
    run_ranks: Any, hook: str, bare: bool, check_every: int | None, warns: bool
) -> None:
    warnings, unsaid = run_ranks(_on_other_machines, hook, bare, check_every)
    assert not unsaid and len(warnings) == warns
    for line in warnings:
        assert "PowerSGD" in line and "check_every=N" in line
        assert "ranks [0]: processor 0; ranks [1]: processor 1" in line


def _kept() -> tuple[list[bool], int]:
    """The kernel before and after a load, and the collectives of the handshakes."""
    compressor = Picky(commhooks.PowerSGD(start_powerSGD_iter=1))
    ddp = wrap(mlp())
    with mock.patch.object(PowerSGDCompressor, "native_build", Picky.native_build):
        hook = commhooks.attach(ddp, compressor.config)
        session = session_of(hook)
        kernels = [session.compressor.native]
        train(ddp, 2)
        hook.load_state_dict(hook.state_dict("per_rank"))
        kernels.append(session.compressor.native)
        train(ddp, 2)
        kernels.append(session.compressor.native)
    return kernels, hook.stats()["handshakes"]


def test_the_choice_outlives_a_load(run_ranks: Any) -> None:
    for kernels, handshakes in run_ranks(_kept):
        assert kernels == [True] * 3
        # of the first pass and of the load, with nothing more for the kernel
        assert handshakes == 2
