"""Divide the weights into fragments, and lay each out in buffers."""

from collections.abc import Mapping
from typing import Any

import torch

from commhooks.compressors.unit_plan import ParameterInfo
from commhooks.gradients.names import ParameterNames
from commhooks.local_steps.compressor import LocalStepsCompressor
from commhooks.local_steps.flat_weights import divided, layouts
from commhooks.local_steps.outer_step import OuterStepWorkspace


class Workspaces:
    """Makes the buffers of each fragment when they are needed, and keeps them until `clear`.

    Args:
        sizes: number of elements of each whole parameter, of which this rank may have a shard.
        fragments: their number.
    """

    def __init__(self, names: ParameterNames, sizes: Mapping[str, int], fragments: int) -> None:
        self._names = names
        self._fragments = divided(sizes, fragments)
        self._buffers: dict[int, list[OuterStepWorkspace]] = {}

    def of_fragment(
        self, number: int, compressor: LocalStepsCompressor[Any]
    ) -> list[OuterStepWorkspace]:
        if number not in self._buffers:
            parameters = self._names.named_parameters()
            fragment = {name: parameters[name] for name in self._fragments[number]}
            self._buffers[number] = self._made(fragment, compressor)
        return self._buffers[number]

    def of_all(self, compressor: LocalStepsCompressor[Any]) -> list[OuterStepWorkspace]:
        """Return the buffers of all weights, whose memory is not kept if there are several
        fragments.
        """
        if len(self._fragments) == 1:
            return self.of_fragment(0, compressor)
        return self._made(self._names.named_parameters(), compressor)

    def clear(self) -> None:
        self._buffers.clear()

    def _made(
        self, parameters: Mapping[str, torch.Tensor], compressor: LocalStepsCompressor[Any]
    ) -> list[OuterStepWorkspace]:
        made = []
        for layout in layouts(parameters):
            infos = [
                ParameterInfo.of(slot.name, slot.parameter, self._names, compressor.config, False)
                for slot in layout.slots
            ]
            made.append(compressor.workspace(layout, compressor.plan(infos)))
        return made
