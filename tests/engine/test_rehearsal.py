"""A rehearsal does what a step does, and no more."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import commhooks
from commhooks.compressors.plan import ParameterInfo
from commhooks.engine import average
from commhooks.engine.rehearsal import rehearse
from commhooks.gradients.layout import read_layout
from commhooks.hook.request import HookRequest


@pytest.mark.parametrize(
    ("config", "reads"),
    [
        (commhooks.AllReduce(), 0),
        (commhooks.BF16Compress(), 0),
        (commhooks.Int8Compress(start_iter=0), 1),  # which leaves vectors uncompressed
    ],
)
def test_results_are_read_where_training_reads_them(config: Any, reads: int) -> None:
    flat = torch.randn(100)
    layout = read_layout(flat, [nn.Parameter(torch.zeros(100))], ["w"])
    compressor = HookRequest.parse(config).new_compressor(1)
    assert compressor is not None
    plans = compressor.plan([ParameterInfo("w", layout.parameters[0])])
    with mock.patch.object(average, "all_finite", wraps=average.all_finite) as read:
        rehearsal = rehearse(compressor, layout, plans, flat, 1)
    assert read.call_count == reads
    assert 0 < rehearsal.fastest_s <= rehearsal.spent_s
