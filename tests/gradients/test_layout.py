"""Memory order and back: pure functions on tensors of every kind of strides."""

import pytest
import torch

import commhooks
from commhooks.gradients.layout import (
    matrix_shape,
    memory_order,
    read_layout,
    to_logical,
    to_memory,
)
from tests.support.ddp_steps import mlp, process_group_of_one, wrap


def _tensor(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


# name -> (tensor, its dimensions from the slowest in memory on, n x m)
KINDS: dict[str, tuple[torch.Tensor, tuple[int, ...], tuple[int, int]]] = {
    "matrix": (_tensor(4, 6), (0, 1), (4, 6)),
    "transposed": (_tensor(4, 6).t(), (1, 0), (4, 6)),
    "convolution": (_tensor(5, 4, 3, 2), (0, 1, 2, 3), (5, 24)),
    "channels_last": (
        _tensor(5, 4, 3, 2).to(memory_format=torch.channels_last),
        (0, 2, 3, 1),
        (5, 24),
    ),
    "channels_last_3d": (
        _tensor(5, 4, 3, 2, 2).to(memory_format=torch.channels_last_3d),
        (0, 2, 3, 4, 1),
        (5, 48),
    ),
    "all dimensions turned": (_tensor(2, 3, 4).permute(2, 1, 0), (2, 1, 0), (2, 12)),
    "middle first": (_tensor(3, 4, 5).permute(1, 0, 2), (1, 0, 2), (3, 20)),
    "size 1 in the middle": (_tensor(4, 1, 6), (0, 1, 2), (4, 6)),
    "vector as a row": (_tensor(1, 6), (0, 1), (1, 6)),
    # Not dense: DDP packs these contiguously.
    "expanded": (torch.arange(4.0)[:, None].expand(4, 6), (0, 1), (4, 6)),
    "every other column": (_tensor(4, 12)[:, ::2], (0, 1), (4, 6)),
    "every other row of a transposed": (_tensor(4, 12).t()[::2], (0, 1), (6, 4)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_strides_has_its_order_and_matrix(kind):
    tensor, order, shape = KINDS[kind]
    assert memory_order(tensor) == order
    assert matrix_shape(tensor) == shape


def test_a_size_of_1_says_nothing_about_the_order():
    """Its stride is arbitrary: whatever it is, the elements lie in the same order."""
    for tensor in (
        _tensor(4, 1, 6).as_strided((4, 1, 6), (6, 999, 1)),
        torch.ones(1, 1).as_strided((1, 1), (7, 9)),
    ):
        order = memory_order(tensor)
        assert [d for d in order if tensor.size(d) != 1] == [
            d for d in range(tensor.dim()) if tensor.size(d) != 1
        ]
        assert torch.equal(to_memory(tensor, tensor), tensor.flatten())


@pytest.mark.parametrize("kind", KINDS)
def test_memory_order_and_back_changes_nothing(kind):
    tensor, _, _ = KINDS[kind]
    flat = torch.arange(float(tensor.numel()))
    logical = to_logical(flat, tensor)
    assert logical.shape == tensor.shape
    assert logical.data_ptr() == flat.data_ptr(), "a view, not a copy"
    assert torch.equal(to_memory(logical, tensor), flat)
    assert torch.equal(to_logical(to_memory(tensor, tensor).contiguous(), tensor), tensor)


DENSE = [
    name
    for name, (tensor, _, _) in KINDS.items()
    if tensor.untyped_storage().nbytes() == 4 * tensor.numel()
]


@pytest.mark.parametrize("kind", DENSE)
def test_memory_order_is_that_of_the_storage(kind):
    tensor, _, _ = KINDS[kind]
    in_storage = torch.empty(0).set_(tensor.untyped_storage(), 0, (tensor.numel(),))
    assert torch.equal(to_memory(tensor, tensor), in_storage)


def test_scalars_and_empty_tensors_have_a_layout():
    assert memory_order(torch.tensor(1.0)) == ()
    assert to_logical(torch.ones(1), torch.tensor(1.0)).shape == ()
    assert to_memory(torch.tensor(2.0), torch.tensor(1.0)).tolist() == [2.0]
    assert matrix_shape(torch.empty(0, 4)) == (0, 0)
    assert matrix_shape(torch.empty(4, 0)) == (4, 0)


def test_the_layout_is_where_ddp_puts_the_gradients():
    """Each slot holds the parameter's gradient in memory order, whatever the strides."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 5, 2), torch.nn.Flatten(), torch.nn.Linear(5 * 9, 7)
    )
    model[0].to(memory_format=torch.channels_last)
    model[2].weight = torch.nn.Parameter(torch.randn(45, 7).t())
    seen = []

    def look(state, bucket):
        parameters = bucket.parameters()
        layout = read_layout(bucket.buffer(), parameters, [str(i) for i in range(len(parameters))])
        buffer = bucket.buffer().clone()
        seen.extend((slot, slot.of(buffer)) for slot in layout.slots)
        assert layout.numel == buffer.numel() == sum(slot.numel for slot in layout.slots)
        assert layout.parameters == [slot.parameter for slot in layout.slots]
        return commhooks.noop_hook(None, bucket)

    with process_group_of_one():
        ddp = wrap(model)
        commhooks.attach(ddp, look)
        ddp(torch.randn(2, 3, 4, 4)).square().mean().backward()
    assert {id(slot.parameter) for slot, _ in seen} == {id(p) for p in model.parameters()}
    for slot, flat in seen:
        assert torch.equal(to_logical(flat, slot.parameter), slot.parameter.grad)


def test_a_layout_that_does_not_add_up_is_an_error():
    """Gaps between gradients in another torch must not be compressed wrongly in silence."""

    parameters = list(mlp().parameters())
    buffer = torch.zeros(sum(p.numel() for p in parameters) + 1)
    with pytest.raises(
        RuntimeError, match="the parameters of a bucket have 2648 elements, its buffer has 2649"
    ):
        read_layout(buffer, parameters, [str(i) for i in range(len(parameters))])
