"""States that version 0.1 pickled before the modules of commhooks moved into packages.

`golden/pickles_0.1.pt` holds, for each kind, the pickle of each of two ranks after `SAVED_AT` steps (three of them
compressed), and the gradients of the three steps that followed. That program cannot be run again.
"""

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from tests.support.golden_runs import FOLDER, SAVED_AT, SHAPES, gradients
from tests.support.models import EVERY_PARAMETER, Prescribed, backward, same_bits, worst_error

FILE = FOLDER / "pickles_0.1.pt"


def _unpickled(kind: str, rank: int) -> commhooks.PowerSGDState:
    saved = torch.load(FILE, weights_only=True)[kind]["pickles"][rank]
    return torch.load(io.BytesIO(saved), weights_only=False)


def _resumed(kind: str) -> list[dict[str, torch.Tensor]]:
    state = _unpickled(kind, dist.get_rank())
    assert state.iter == SAVED_AT and state.start_powerSGD_iter == 1 and state.matrix_approximation_rank == 2
    ddp = DistributedDataParallel(Prescribed(SHAPES), bucket_cap_mb=EVERY_PARAMETER)
    ddp.register_comm_hook(state, commhooks.powerSGD_hook)
    found = [backward(ddp, gradients(dist.get_rank(), step)) for step in range(SAVED_AT, SAVED_AT + 3)]
    assert state.iter == SAVED_AT + 3 and state.compression_stats()[0] > 1
    return found


@pytest.mark.parametrize("kind", ["plain"])
def test_training_goes_on_as_it_did(run_ranks: Any, kind: str) -> None:
    expected = torch.load(FILE, weights_only=True)[kind]["gradients"]
    for found in run_ranks(_resumed, kind):
        for got, wanted in zip(found, expected, strict=True):
            assert worst_error(got, wanted) < 1e-5


def test_an_old_pickle_is_written_as_a_new_one() -> None:
    state = _unpickled("plain", 1)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    assert b"commhooks.memory" not in buffer.getvalue()
    again = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    before, after = state.session.state, again.session.state
    assert (before.step, before.loss_scale, before.local_missing) == (after.step, after.loss_scale, after.local_missing)
    for key in ("q", "residual"):
        assert before[key].keys() == after[key].keys()
        assert all(same_bits(before[key][name], after[key][name]) for name in before[key])
