"""DDP's broadcasts of buffers are off under the attribute that this torch has."""

from types import SimpleNamespace

import pytest

from commhooks.errors import AttachError
from commhooks.gradients.ddp import stop_buffer_broadcasts


@pytest.mark.parametrize("name", ["broadcast_buffers", "forward_sync_buffers"])
def test_the_attribute_of_either_version_is_set_to_false(name: str) -> None:
    model = SimpleNamespace(**{name: True})
    stop_buffer_broadcasts(model)
    assert vars(model) == {name: False}


def test_a_version_of_torch_with_neither_is_refused() -> None:
    with pytest.raises(AttachError, match="neither forward_sync_buffers nor broadcast_buffers"):
        stop_buffer_broadcasts(SimpleNamespace())
