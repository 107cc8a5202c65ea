"""What hooks ask of an accelerator: memory for learned state in the first pass, and no more
operators for many parameters than for few. Seen on CPU tensors, and on tensors without memory.
"""

import pytest
import torch

import commhooks
from commhooks.request import HookRequest
from tests.support.ddp_steps import process_group_of_one
from tests.support.dispatched import Dispatched
from tests.support.local_driver import LocalDriver
from tests.support.models import backward, masks, random_gradients, wrap

META = torch.device("meta")
SHAPES = {"first": (64, 64), "bias": (64,), "second": (48, 80)}


@pytest.mark.parametrize(
    ("hook", "start"),
    [
        ("powerSGD", "start_powerSGD_iter"),
        ("batched_powerSGD", "start_powerSGD_iter"),
        ("int8", "start_iter"),
        ("int4", "start_iter"),
    ],
)
def test_nothing_that_is_kept_is_allocated_when_compression_begins(hook: str, start: str) -> None:
    """A device without the memory for it fails in the first pass, and not at the start step."""
    new_bytes = []
    with process_group_of_one(), masks():
        ddp = wrap(SHAPES)
        attached = commhooks.attach(ddp, hook, hook_options={start: 3})
        for step in range(5):
            gradients = random_gradients(SHAPES, 0, step)
            with Dispatched() as dispatched:
                backward(ddp, gradients)
            new_bytes.append(dispatched.new_bytes)
        assert attached.stats()["compressed_steps"] == 2
        residual = attached.plan().memory.residual
    assert new_bytes[0] > residual > 30_000
    assert new_bytes[3] - new_bytes[4] < 2000, (
        "what is kept is allocated in the first compressed step"
    )


def _operators(hook: str, layers: int, world_size: int, dtype: torch.dtype) -> int:
    """Of a warm step, on one bucket of so many matrices and vectors."""
    shapes = [(40, 50), (40,)] * layers
    parameters = {
        str(i): torch.empty(shape, device=META, dtype=dtype) for i, shape in enumerate(shapes)
    }
    compressor = HookRequest.parse(hook).new_compressor(None)
    assert compressor is not None
    ranks = LocalDriver(compressor, [parameters], META, world_size)
    ranks.step()
    with Dispatched() as dispatched:
        ranks.step()
    return sum(dispatched.operators.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hook", ["int8", "int4"])
def test_operators_depend_on_neither_parameters_nor_ranks(hook: str, dtype: torch.dtype) -> None:
    """Only sums over the ranks take one operator more for twice the ranks."""
    count = _operators(hook, 2, 2, dtype)
    assert count < 120 and abs(_operators(hook, 30, 2, dtype) - count) <= 2
    assert _operators(hook, 2, 64, dtype) - count <= 2 * 5 + 2
