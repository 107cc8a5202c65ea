"""Views of one tensor that follow a dict of tensors."""

import torch

from commhooks.compressors.error_feedback import NamedViews


def test_slices_follow_a_dict() -> None:
    slices = NamedViews([("a", 0, (2,)), ("b", 2, (1, 2))], torch.zeros(4))
    entries = {"a": torch.tensor([1.0, 2.0]), "other": torch.zeros(3)}
    own = entries["a"]
    assert slices.gather(entries).tolist() == [1, 2, 0, 0] and entries["a"] is own
    whole = slices.bind(entries)
    assert sorted(entries) == ["a", "b", "other"] and entries["a"] is not own
    whole[2:] = 7
    assert entries["b"].tolist() == [[7, 7]]
    entries["b"] = torch.tensor([[8.0, 9.0]])  # as a load does
    del entries["a"]  # as losing it does
    assert slices.gather(entries).tolist() == [0, 0, 8, 9]
