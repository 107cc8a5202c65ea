"""The Triton kernels of shards compute the bits of torch's operators, in Triton's interpreter. None
of this shows that they run on a GPU.
"""

import sys
from typing import Any
from unittest import mock

import pytest
import torch

from commhooks.compressors.quantized.mean import BlockCode
from commhooks.sharded.native import check_native
from tests.compressors.quantized.test_triton_bits import EXACT, arithmetic_of, needs_triton, run
from tests.support.features import custom_collectives

pytestmark = custom_collectives
PROGRAM = "tests.sharded.triton_shards"


@needs_triton
@pytest.mark.parametrize("what", ["kernels", "codec"])
def test_the_bits_are_those_of_torch_and_the_oracle(what: str) -> None:
    assert run(what, program=PROGRAM) == []


@needs_triton
def test_a_kernel_that_is_wrong_or_does_not_run_is_not_used() -> None:
    *wrong, broken = run("faults", program=PROGRAM)
    assert len(wrong) == 3
    assert all("computes other bits than torch" in reason for reason in wrong), wrong
    assert "cannot be compiled or run: " in broken and "COMMHOOKS_NATIVE=0 turns it off" in broken


@needs_triton
def test_each_operation_is_rounded_by_itself_on_nvidia_gpus() -> None:
    found = run("instructions", program=PROGRAM, interpreted=False)
    assert arithmetic_of(found) <= EXACT
    assert "cvt.rn.bf16.f32" in found
    assert not any("ftz" in instruction or "approx" in instruction for instruction in found)


def test_without_triton_torch_computes_and_the_reason_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for module in ("compressors.quantized", "sharded"):
        monkeypatch.delitem(sys.modules, f"commhooks.{module}.triton_kernel", raising=False)
    arguments: Any = torch.device("cuda"), [torch.float32], BlockCode(8, 128)
    native, reason = check_native(*arguments)
    assert not native and "needs Triton, which cannot be imported" in reason
    with mock.patch.dict("os.environ", {"COMMHOOKS_NATIVE": "0"}):
        assert check_native(*arguments) == (False, "")
