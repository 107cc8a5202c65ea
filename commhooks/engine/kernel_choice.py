"""Choose what all ranks compute with: the native library if all have the same build of it, otherwise torch.

Every rank computes its own copy of the averaged gradient, so ranks whose results differ in the last bits would drift
apart. The ranks compare the keys of their `KernelSupport` in an exchange that they make anyway, and exchange the whole
only if keys differ.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commhooks.comm.collectives import agreement_key, gather_texts
from commhooks.compressors.base import Compressor
from commhooks.errors import CommHookError, HookConfigError
from commhooks.gradients.precision import arithmetic_of


class KernelSupport(NamedTuple):
    """What one rank can compute with."""

    build: str = ""
    """`Compressor.native_build`, if it is the same for all dtypes; "" without native kernels."""
    missing: str = ""
    """Why there are none, and the remedy; "" if none are missed."""
    arithmetic: str = ""
    """See `arithmetic_of`; "" for hooks that compute nothing from what they receive."""
    cannot: str = ""
    """Why this machine cannot run the hook at all; "" if it can."""

    @classmethod
    def of(cls, compressor: Compressor[Any], device: torch.device, dtypes: Collection[torch.dtype]) -> "KernelSupport":
        """What this rank has for gradients of `dtypes`, at least one, on `device`."""
        try:
            for dtype in dtypes:
                compressor.check_here(device, dtype)
        except HookConfigError as error:
            return cls(cannot=str(error))
        arithmetic = arithmetic_of(device) if compressor.computes_from_received else ""
        try:
            builds = {compressor.native_build(device, dtype) for dtype in dtypes}
        except HookConfigError as error:
            return cls(missing=str(error), arithmetic=arithmetic)
        return cls(builds.pop() if len(builds) == 1 else "", arithmetic=arithmetic)

    @property
    def key(self) -> int:
        """Equal on two ranks that support the same."""
        return agreement_key(*self)


class Choice(NamedTuple):
    """What all ranks compute with, and what rank 0 should log about it."""

    native: bool = False
    slower: str = ""
    """Why not with the native library; "" if no rank misses it."""
    drift: str = ""
    """How the arithmetic of the ranks differs, so that replicas may drift apart; "" if it does not."""

    @property
    def kernel(self) -> str:
        """Its name for users."""
        return "native" if self.native else "torch"

    def remarks(self, name: str, *, checked: bool = False) -> list[str]:
        """What rank 0 should log. `name`: the compressor's; `checked`: the weights of the replicas are compared now and
        then, so that drift does not go unseen."""
        lines = []
        if self.slower:
            lines.append(f"{name} computes with the kernel {self.kernel!r} on all ranks. {self.slower}")
        if self.drift and not checked:
            lines.append(
                f"the machines of the ranks may compute the last bits of {name} differently, so that the replicas "
                f"drift apart slowly: {self.drift}. Use machines, versions and thread counts of one kind, or have the "
                "weights compared by commhooks.attach(..., check_every=N)"
            )
        return lines


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
        texts = gather_texts(json.dumps(own), group, device, "what each rank can compute with")
        supports = [KernelSupport(*json.loads(text)) for text in texts]
    return choose(supports, group.rank(), error)


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
    builds, arithmetic = {x.build for x in supports}, [x.arithmetic for x in supports]
    lacking = [each for each, support in enumerate(supports) if support.missing]
    slower = ""
    if lacking:  # one reason will do: each may name other files
        slower = (f"ranks {lacking}: " if len(supports) > 1 else "") + supports[lacking[0]].missing
    elif supports[0].build and len(builds) > 1:
        texts = [f"{f'native {x.build}' if x.build else 'torch'} ({x.arithmetic})" for x in supports]
        slower = f"the ranks' kernels differ: {_by_rank(texts)}"
    drift = _by_rank(arithmetic) if len(set(arithmetic)) > 1 else ""
    return Choice(len(builds) == 1 and "" not in builds, slower, drift)


def _by_rank(texts: Sequence[str]) -> str:
    """Each text with its ranks."""
    ranks = {text: [rank for rank, each in enumerate(texts) if each == text] for text in dict.fromkeys(texts)}
    return "; ".join(f"ranks {which}: {text}" for text, which in ranks.items())
