"""Training on a GPU gives the CPU's results, skips bad steps, and works from a side stream."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commhooks import PowerSGD
from tests.cuda.places import CPU, GLOO, ON_CUDA, entered, same, world_size
from tests.support.training import Run, make_model

STEPS, START = 8, 2


def _train(
    place: str, batch_shapes: bool = False, wrapper: str | None = None, side: bool = False
) -> dict[str, Any]:
    config = PowerSGD(
        matrix_approximation_rank=2,
        start_powerSGD_iter=START,
        batch_tensors_with_same_shape=batch_shapes,
    )
    with entered(place) as here:
        with torch.cuda.stream(torch.cuda.Stream()) if side else contextlib.nullcontext():
            ddp = {"process_group": here.group}
            run = Run.new(
                make_model().to(here.device), hook=config, ddp=ddp, wrapper=wrapper
            ).train(STEPS)
            return {"weights": run.weights().cpu(), "stats": run.hook.stats()}


@pytest.mark.cuda
@pytest.mark.parametrize("batch_shapes", [False, True])
@pytest.mark.parametrize("wrapper", [None, "fp16", "bf16"])
def test_two_ranks_equal_those_on_the_cpu(
    run_ranks: Any, wrapper: str | None, batch_shapes: bool
) -> None:
    on_cpu, on_gpu = (run_ranks(_train, place, batch_shapes, wrapper) for place in (CPU, GLOO))
    assert torch.equal(on_gpu[0]["weights"], on_gpu[1]["weights"])
    assert on_gpu[0]["stats"]["compressed_steps"] == STEPS - START
    assert (on_gpu[0]["weights"] - on_cpu[0]["weights"]).abs().max() < (
        1e-4 if wrapper is None else 1e-2
    )


@pytest.mark.parametrize("place", ON_CUDA)
def test_a_model_that_was_wrapped_on_a_side_stream_trains_as_usual(
    run_ranks: Any, place: str
) -> None:
    """As Lightning does."""
    ranks = world_size(place)
    plain, side = (
        run_ranks(_train, place, False, None, on_side_stream, world_size=ranks)
        for on_side_stream in (False, True)
    )
    for expected, got in zip(plain, side, strict=True):
        assert got["stats"]["compressed_steps"] == STEPS - START
        assert same(place, got["weights"], expected["weights"])


def _one_bad_step(place: str) -> dict[str, Any]:
    config = PowerSGD(matrix_approximation_rank=2, start_powerSGD_iter=START)
    with entered(place) as here:
        run = Run.new(
            make_model().to(here.device), hook=config, ddp={"process_group": here.group}
        ).train(5)
        saved = run.save(residual="per_rank")
        before = run.weights()
        if dist.get_rank() == 0:
            handle = run.ddp.module[3].weight.register_hook(
                lambda gradient: gradient * float("inf")
            )
        run.train(1)
        if dist.get_rank() == 0:
            handle.remove()
        bad = not run.gradients.pop().isfinite().all()
        after = run.save(residual="per_rank")
        torch.nn.utils.vector_to_parameters(before, run.ddp.parameters())
        run.optimizer.state.clear()
        run.train(2)
        return {
            "weights": run.weights().cpu(),
            "bad": bad,
            "kept": all(
                torch.equal(entry["residual"][0], after["hook"]["parameters"][name]["residual"][0])
                for name, entry in saved["hook"]["parameters"].items()
                if entry["residual"] is not None
            ),
            "stats": run.hook.stats(),
        }


@pytest.mark.parametrize("place", ON_CUDA)
def test_a_bad_step_is_not_committed(run_ranks: Any, place: str) -> None:
    results = run_ranks(_one_bad_step, place, world_size=world_size(place))
    for result in results:
        assert result["stats"]["nonfinite_steps"] == 1 and result["stats"]["step"] == 7
        assert result["bad"] and result["kept"]
        assert result["weights"].isfinite().all()
        assert torch.equal(result["weights"], results[0]["weights"])
