"""A compressor with what it has learned, on the ranks of one model: base of whatever runs its exchanges."""

from typing import Any

from commhooks.comm.counters import Counters
from commhooks.compressors.base import Compressor
from commhooks.engine.consensus import Binding, Consensus
from commhooks.engine.state import HeldState, LearnedState


class Learning:
    """
    Args:
        binding: the model and the ranks.
        state: the learned state, changed at commits only.
        counters: the counters to update; None: new ones.

    Attributes:
        state, held: the learned state, and who may read and write it when.
        consensus: what all ranks do alike: compressor, kernel, arrangement.
    """

    def __init__(
        self, compressor: Compressor[Any], binding: Binding, state: LearnedState, counters: Counters | None = None
    ) -> None:
        self.state = state
        self.counters = counters if counters is not None else Counters()
        self.held = HeldState(state, self.counters)
        self.consensus = Consensus(compressor, binding, self.held, self.counters)

    @property
    def compressor(self) -> Compressor[Any]:
        """The compressor in force."""
        return self.consensus.compressor

    @property
    def has_run(self) -> bool:
        """Whether the ranks have agreed on their state in a first backward pass."""
        return self.consensus.nonce is not None

    def close(self) -> None:
        """Move the learned state to the host, until another training of the model begins."""
        with self.held.settled():
            self.state.to_host()
