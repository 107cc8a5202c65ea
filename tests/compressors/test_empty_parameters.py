"""Parameters without elements change no bit of the others. FSDP2 refuses them itself."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.kind_parameters import ONE_OF_EACH
from tests.support.kinds import KINDS, Kind
from tests.support.models import same_bits
from tests.support.training import make_model

STEPS = 3
EVERY = KINDS | {"diloco": Kind("diloco", {"sync_every": 2, "fragments": 2})}


class _Empty(nn.Module):
    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.empty(shape, dtype=dtype) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(tensor.sum() for tensor in self.tensors).to(x.dtype)


def _model(empty: bool) -> nn.Sequential:
    """`empty`: also has parameters without elements, some in a bucket of their own."""
    model = make_model()
    if empty:
        model.append(_Empty((0, 3), (4, 0, 2), (0,)))
        model.append(_Empty((3, 0), dtype=torch.bfloat16))
    return model


def _trained(name: str, *forms: str, **more: Any) -> dict[bool, list[torch.Tensor]]:
    """Return the weights with and without empty parameters, at the end and after saves."""
    kind = EVERY[name]
    weights = {}
    for empty in (False, True):
        run = kind.new(model=_model(empty), **more).train(STEPS)
        resumed = [
            kind.new(model=_model(empty), **more).load(run.save(residual=form)) for form in forms
        ]
        weights[empty] = [trained.train(1).weights() for trained in (run, *resumed)]
    return weights


@pytest.mark.parametrize("name", [*ONE_OF_EACH, "diloco"])
def test_parameters_without_elements_change_nothing(run_ranks: Any, name: str) -> None:
    for weights in run_ranks(_trained, name, "per_rank", "mean", "distributed"):
        with_empty, without = weights[True], weights[False]
        assert all(tensor.isfinite().all() for tensor in with_empty)
        # The matrix of a bucket starts from a Q that the names of its parameters decide.
        assert EVERY[name].layouts_matter or all(map(same_bits, with_empty, without))


@pytest.mark.parametrize("name", ["powerSGD, bf16 wrapper", "int8, native"])
def test_parameters_without_elements_change_nothing_between_nodes(
    run_ranks: Any, name: str
) -> None:
    for weights in run_ranks(_trained, name, "mean", ranks_per_node=2, world_size=4):
        assert all(map(same_bits, weights[True], weights[False]))
