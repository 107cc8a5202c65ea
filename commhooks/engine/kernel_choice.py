"""Choose the kernel with which all ranks compute.

Each rank notes its `KernelSupport`. The ranks compare the keys of these in an exchange that they make anyway, and only
if they differ do they exchange the whole. Every rank then makes the same choice.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import agreement_key, gather_texts
from commhooks.compressors.base import Compressor
from commhooks.compressors.kernel import TORCH, Kernel
from commhooks.errors import CommHookError, HookConfigError
from commhooks.gradients.precision import arithmetic_of


@dataclass(frozen=True)
class KernelSupport:
    """What one rank can compute with.

    Attributes:
        kernel: its fastest kernel; see `KernelHere`.
        missing: why a faster one is missing.
        arithmetic: see `arithmetic_of`; "" for hooks that compute nothing from what they receive.
        cannot: why this machine cannot run the hook at all; "" if it can.
    """

    kernel: Kernel = TORCH
    missing: str = ""
    arithmetic: str = ""
    cannot: str = ""

    @classmethod
    def of(cls, compressor: Compressor[Any], device: torch.device, dtypes: Collection[torch.dtype]) -> "KernelSupport":
        """What this rank has for gradients of `dtypes`, at least one, on `device`."""
        try:
            for dtype in dtypes:
                compressor.check_here(device, dtype)
        except HookConfigError as error:
            return cls(cannot=str(error))
        found = [compressor.kernel_here(device, dtype) for dtype in dtypes]
        missing = next((each.missing for each in found if each.missing), "")
        return cls(
            _common([each.kernel for each in found]),
            missing,
            arithmetic_of(device) if compressor.computes_from_received else "",
        )

    @property
    def key(self) -> int:
        """Equal on two ranks that support the same."""
        return agreement_key(self.as_text())

    def as_text(self) -> str:
        return json.dumps([self.kernel.name, self.kernel.build, self.missing, self.arithmetic, self.cannot])

    @classmethod
    def from_text(cls, text: str) -> "KernelSupport":
        name, build, *others = json.loads(text)
        return cls(Kernel(name, build), *others)


@dataclass(frozen=True)
class Choice:
    """The kernel of all ranks, and what rank 0 should log about it.

    Attributes:
        kernel: the fastest one of rank 0 if all ranks have it, otherwise torch.
        slower: why not a faster one; "" if there is none.
        drift: how the arithmetic of the ranks differs, so that replicas may drift apart; "" if it does not.
    """

    kernel: Kernel = TORCH
    slower: str = ""
    drift: str = ""

    def remarks(self, name: str, *, checked: bool = False) -> list[str]:
        """What rank 0 should log. `name`: the compressor's; `checked`: the weights of the replicas are compared
        now and then, so that drift does not go unseen."""
        said = []
        if self.slower:
            said.append(f"{name} computes with the kernel {self.kernel.name!r} on all ranks. {self.slower}")
        if self.drift and not checked:
            said.append(
                f"the machines of the ranks may compute the last bits of {name} differently, so that the replicas "
                f"drift apart slowly: {self.drift}. Use machines, versions and thread counts of one kind, or have the "
                "weights compared by commhooks.attach(..., check_every=N)"
            )
        return said


def agreed_choice(
    own: KernelSupport, keys: Sequence[int], group: dist.ProcessGroup, device: torch.device, error: type[CommHookError]
) -> Choice:
    """The choice of all ranks of `group`. All of them must call this.

    Args:
        keys: `KernelSupport.key` of every rank.
        error: raised on all ranks if some of them cannot run the hook.

    Raises:
        HookConfigError: on all ranks, if none of them can run the hook.
        HookRunError: another rank has failed, or did not take part within the process group's timeout.
    """
    supports = [own] * len(keys)
    if len(set(keys)) > 1:
        what = "what each rank can compute with"
        supports = [KernelSupport.from_text(text) for text in gather_texts(own.as_text(), group, device, what)]
    return choose(supports, group.rank(), error)


def _common(kernels: Sequence[Kernel]) -> Kernel:
    return kernels[0] if len(set(kernels)) == 1 else TORCH


def _by_rank(texts: Sequence[str]) -> str:
    """Each text with its ranks."""
    ranks = {text: [rank for rank, each in enumerate(texts) if each == text] for text in dict.fromkeys(texts)}
    return "; ".join(f"ranks {which}: {text}" for text, which in ranks.items())


def choose(supports: Sequence[KernelSupport], rank: int, error: type[CommHookError]) -> Choice:
    """The choice where each rank supports this; `rank` is this one. See `agreed_choice` for the errors."""
    unable = [each for each, support in enumerate(supports) if support.cannot]
    if len(unable) == len(supports):
        raise HookConfigError(supports[rank].cannot)
    if unable:
        raise error(
            f"of {len(supports)} ranks these cannot do what all of them ask for: {unable}. "
            f"Why: {supports[unable[0]].cannot}"
        )
    kernel = _common([each.kernel for each in supports])
    lacking = [each for each, support in enumerate(supports) if support.missing]
    slower = ""
    if lacking:  # one reason will do: each may name other files
        slower = (f"ranks {lacking}: " if len(supports) > 1 else "") + supports[lacking[0]].missing
    elif supports[0].kernel != kernel:
        builds = [f"{each.kernel.name} {each.kernel.build}".rstrip() + f" ({each.arithmetic})" for each in supports]
        slower = f"the ranks' kernels differ: {_by_rank(builds)}"
    arithmetic = [support.arithmetic for support in supports]
    return Choice(kernel, slower, _by_rank(arithmetic) if len(set(arithmetic)) > 1 else "")
