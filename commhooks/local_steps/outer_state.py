"""What local steps learn: the anchor, and the momentum of the outer optimizer."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from commhooks.comm.collectives import broadcast_first
from commhooks.engine.consensus import Binding
from commhooks.engine.session import ExchangeDriver
from commhooks.engine.state import LearnedState
from commhooks.engine.streams import in_background, wait_for_background
from commhooks.gradients.layout import BucketLayout
from commhooks.gradients.precision import keep_for_current_stream
from commhooks.local_steps.compressor import LocalStepsCompressor
from commhooks.local_steps.flat_weights import copied
from commhooks.local_steps.offload import to_host
from commhooks.local_steps.outer_step import ANCHOR, MOMENTUM


class OuterState(ExchangeDriver):
    """Holds anchor and momentum of one model, in the memory where they are kept."""

    def __init__(self, compressor: LocalStepsCompressor[Any], binding: Binding) -> None:
        super().__init__(compressor, binding, LearnedState.of(compressor.state_fields))

    @property
    def compressor(self) -> LocalStepsCompressor[Any]:
        compressor = super().compressor
        assert isinstance(compressor, LocalStepsCompressor)
        return compressor

    def set_anchor(self, parameters: Mapping[str, torch.Tensor]) -> None:
        # one by one, because the whole anchor may not fit on the device
        for name, parameter in parameters.items():
            self.state[ANCHOR.key].update(copied({name: parameter}))
            self.place_state([name])

    def place_state(self, names: Iterable[str] | None = None) -> None:
        """Move anchor and momentum of these parameters (None: all) to where they are kept."""
        known = self.consensus.binding.names.named_parameters()
        for key, kept in self.state.entries.items():
            for name in kept.keys() if names is None else kept.keys() & names:
                if key in (ANCHOR.key, MOMENTUM.key) and self.compressor.offloads(
                    known[name].device
                ):
                    kept[name] = to_host(kept[name])
                elif self.compressor.config.delay:
                    # Commits on the background stream free memory that this stream has allocated.
                    with in_background(kept[name].device, after_current=False):
                        keep_for_current_stream([kept[name]])

    @contextlib.contextmanager
    def as_behind(self, device: torch.device) -> Iterator[None]:
        """With a delay run the body on the stream to which the memory of the learned state
        belongs.
        """
        if not self.compressor.config.delay:
            yield
            return
        with in_background(device, after_current=True):
            yield
        wait_for_background(device)

    def share_momentum(self, layout: BucketLayout, *, exchanged: bool) -> None:
        """Copy the momentum of a buffer from rank 0 to all ranks of the model, which may all save
        it.
        """
        momentum = self.state[MOMENTUM.key]
        flat = torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)
        for slot in layout.slots if exchanged else ():
            slot.of(flat).copy_(momentum[slot.name])
        broadcast_first(flat, self.consensus.binding.group(), self.counters, "the outer step")
        if not exchanged:
            names = [slot.name for slot in layout.slots]
            momentum.update({slot.name: slot.of(flat).clone() for slot in layout.slots})
            self.place_state(names)
