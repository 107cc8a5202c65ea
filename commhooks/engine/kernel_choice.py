"""Choose the kernel of all ranks: the native library if all ranks have the same build of it,
otherwise torch.

Every rank computes its own copy of the averaged gradient, so replicas drift apart if the kernels
differ in the last bits. The ranks compare `KernelSupport.key` in an exchange that they make anyway;
only if keys differ do they send the rest.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commhooks.comm.collectives import agreement_key, gather_texts
from commhooks.compressors.base import Compressor
from commhooks.errors import CommHookError, HookConfigError, listed
from commhooks.gradients.precision import arithmetic_of


class KernelSupport(NamedTuple):
    """Describes the kernels that one rank can use. A field is "" if it does not apply.

    Attributes:
        build: `Compressor.native_build`, if it is the same for all dtypes.
        missing: why the native library cannot be used, and the remedy.
        arithmetic: see `arithmetic_of`; only for hooks that compute with received numbers.
        cannot: why this machine cannot run the hook at all.
    """

    build: str = ""
    missing: str = ""
    arithmetic: str = ""
    cannot: str = ""

    @classmethod
    def of(
        cls, compressor: Compressor[Any], device: torch.device, dtypes: Collection[torch.dtype]
    ) -> "KernelSupport":
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
        return agreement_key(*self)


class KernelChoice(NamedTuple):
    """Describes the kernel of all ranks. `slower`: why they do not use the native library, "" if no
    rank lacks it. `drift`: how the arithmetic of the ranks differs, so that replicas may drift
    apart, or "".
    """

    native: bool = False
    slower: str = ""
    drift: str = ""

    @property
    def name(self) -> str:
        return "native" if self.native else "torch"

    def warnings(self, compressor: str, *, checked: bool = False) -> list[str]:
        """Return the warnings for rank 0 to log. `checked`: the weights are compared regularly,
        which reveals drift.
        """
        found = []
        if self.slower:
            found.append(
                f"{compressor} computes with the kernel {self.name!r} on all ranks. {self.slower}"
            )
        if self.drift and not checked:
            found.append(
                f"the machines of the ranks may compute the last bits of {compressor} differently,"
                f" so that the replicas drift apart slowly: {self.drift}. Use machines, versions"
                " and thread counts of one kind, or have the weights compared by"
                " commhooks.attach(..., check_every=N)"
            )
        return found


def agreed_choice(
    own: KernelSupport,
    keys: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
    error: type[CommHookError],
) -> KernelChoice:
    """Choose the kernel for all ranks of `group`, from the `KernelSupport.key` of every rank
    (`keys`). All of them must call this. On all ranks, raises HookConfigError if none of them can
    run the hook, and `error` if some cannot.
    """
    supports = [own] * len(keys)
    if len(set(keys)) > 1:
        texts = gather_texts(json.dumps(own), group, device, "what each rank can compute with")
        supports = [KernelSupport(*json.loads(text)) for text in texts]
    return choose(supports, group.rank(), error)


def choose(
    supports: Sequence[KernelSupport], rank: int, error: type[CommHookError]
) -> KernelChoice:
    unable = [each for each, support in enumerate(supports) if support.cannot]
    if len(unable) == len(supports):
        raise HookConfigError(supports[rank].cannot)
    if unable:
        raise error(
            f"ranks [{listed(unable)}] of {len(supports)} cannot run the hook that all ranks"
            f" attach: {supports[unable[0]].cannot}"
        )
    builds, arithmetic = {x.build for x in supports}, [x.arithmetic for x in supports]
    lacking = [each for each, support in enumerate(supports) if support.missing]
    slower = ""
    if lacking:  # show one reason only: the reasons may differ in the files that they name
        slower = (f"ranks [{listed(lacking)}]: " if len(supports) > 1 else "") + supports[
            lacking[0]
        ].missing
    elif supports[0].build and len(builds) > 1:
        texts = [
            f"{f'native {x.build}' if x.build else 'torch'} ({x.arithmetic})" for x in supports
        ]
        slower = f"the ranks' kernels differ: {_by_rank(texts)}"
    drift = _by_rank(arithmetic) if len(set(arithmetic)) > 1 else ""
    return KernelChoice(len(builds) == 1 and "" not in builds, slower, drift)


def _by_rank(texts: Sequence[str]) -> str:
    ranks = {
        text: [rank for rank, each in enumerate(texts) if each == text]
        for text in dict.fromkeys(texts)
    }
    return "; ".join(f"ranks [{listed(which)}]: {text}" for text, which in ranks.items())
