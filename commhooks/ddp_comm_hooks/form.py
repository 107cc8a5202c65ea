"""Which form of PowerSGD a hook function of torch's names runs."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from commhooks.compressors.powersgd.batched import BatchedPowerSGDCompressor
from commhooks.compressors.powersgd.compressor import PowerSGDCompressor
from commhooks.compressors.powersgd.options import PowerSGD
from commhooks.engine.session import Session


@dataclass(frozen=True)
class Form:
    """The form of PowerSGD that a hook function runs: per parameter or per bucket, and the wire dtype (None: that of
    the bucket)."""

    batched: bool
    wire_dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        return "batched_powerSGD_hook" if self.batched else "powerSGD_hook"

    def fits(self, session: Session) -> bool:
        """Whether the session runs this form."""
        return type(session.compressor) is self.kind and session.compressor.wire_dtype == self.wire_dtype

    @property
    def kind(self) -> Any:
        return BatchedPowerSGDCompressor if self.batched else PowerSGDCompressor

    def compressor(self, options: PowerSGD) -> PowerSGDCompressor | BatchedPowerSGDCompressor:
        # As in torch, one state serves both forms, so both compressors use the same options.
        return self.kind(options, self.wire_dtype)


FORMS: "weakref.WeakKeyDictionary[Callable[..., Any], Form]" = weakref.WeakKeyDictionary()
"""The form of each PowerSGD hook function; the wrappers add entries."""


def form_of(hook: Callable[..., Any]) -> Form | None:
    """The form of PowerSGD that a hook function runs; None for any other hook."""
    try:
        return FORMS.get(hook)
    except TypeError:  # callable objects need not be hashable
        return None
