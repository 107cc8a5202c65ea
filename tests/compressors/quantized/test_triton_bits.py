"""Triton's kernels compute the bits of torch's operators, in Triton's interpreter. A GPU is not
needed, and none of this shows that they run on one: tests/cuda/test_gpu_triton.py does.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from commhooks.compressors.quantized import compressor as quantized
from commhooks.compressors.quantized.mean import BlockCode
from commhooks.errors import HookConfigError
from tests.support.features import keeps_denormals

ROOT = Path(__file__).resolve().parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs Triton (pip install triton, 1 GB): see make test-triton",
)


EXACT = {"mul.rn.f32", "div.rn.f32", "add.rn.f32", "sub.rn.f32"}
"""As torch's operators: nothing joined, no approximate division."""


def run(
    what: str,
    *,
    program: str = "tests.compressors.quantized.triton_bits",
    interpreted: bool = True,
) -> Any:
    environment = {**os.environ, "TRITON_INTERPRET": "1"} if interpreted else os.environ
    command = [sys.executable, "-m", program, what]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def arithmetic_of(instructions: list[str]) -> set[str]:
    kinds = ("fma", "mad", "mul", "div", "add", "sub", "rcp")
    return {name for name in instructions if name.split(".")[0] in kinds}


@needs_triton
@pytest.mark.parametrize("what", ["kernels", "hooks"])
def test_the_bits_are_those_of_torch(what: str) -> None:
    assert run(what) == []


@needs_triton
def test_a_kernel_that_is_wrong_or_does_not_run_is_not_used() -> None:
    *wrong, broken = run("faults")
    assert len(wrong) == 4 and all(
        "computes other bits than torch" in reason for reason in wrong
    ), wrong
    assert "cannot be compiled or run: " in broken and "COMMHOOKS_NATIVE=0 turns it off" in broken


@needs_triton
@keeps_denormals
def test_each_operation_is_rounded_by_itself_on_nvidia_gpus() -> None:
    """Also without denormals as zero."""
    instructions = run("instructions", interpreted=False)
    assert arithmetic_of(instructions) == EXACT
    assert "cvt.rn.bf16.f32" in instructions and not any(
        "ftz" in instruction or "approx" in instruction for instruction in instructions
    )


def test_without_triton_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "commhooks.compressors.quantized.triton_kernel", raising=False)
    arguments = torch.device("cuda"), torch.float32, BlockCode(8, 256)
    with pytest.raises(
        HookConfigError, match=r"needs Triton, which cannot be imported .*COMMHOOKS_NATIVE=0"
    ):
        quantized.native_build(*arguments)
    with mock.patch.dict(os.environ, {"COMMHOOKS_NATIVE": "0"}):
        assert quantized.native_build(*arguments) == ""
