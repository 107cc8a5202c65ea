"""Choose the kernel of all ranks: the native library if all have the same build, otherwise torch.

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
    """Describes the kernel of all ranks.

    `slower`: why they do not use the native library; "" if no rank lacks it. `drift`: how the
    arithmetic of the ranks differs, so that replicas may drift apart, or "".
    """

    native: bool = False
    slower: str = ""
    drift: str = ""

    @property
    def name(self) -> str:
        return "native" if self.native else "torch"

    def warnings(self, compressor: str, *, checked: bool = False) -> list[str]:
        """Return the warnings for rank 0 to log.

        `checked`: the weights are compared regularly, which reveals drift.
        """
        warnings = []
        if self.slower:
            warnings.append(
                f"{compressor} computes with the kernel {self.name!r} on all ranks. {self.slower}"
            )
        if self.drift and not checked:
            warnings.append(
                f"the machines of the ranks may compute the last bits of {compressor} differently,"
                f" so that the replicas drift apart slowly: {self.drift}. Use machines, versions"
                " and thread counts of one kind, or have the weights compared by"
                " commhooks.attach(..., check_every=N)"
            )
        return warnings


def agreed_choice(
    support: KernelSupport,
    keys: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
    error: type[CommHookError],
) -> KernelChoice:
    """Choose the kernel for all ranks of `group`; all of them must call this.

    `support` is of this rank; `keys` has the `KernelSupport.key` of every rank. On all ranks,
    raises HookConfigError if none of them can run the hook, and `error` if some cannot.
    """
    supports = [support] * len(keys)
    if len(set(keys)) > 1:
        texts = gather_texts(json.dumps(support), group, device, "what each rank can compute with")
        supports = [KernelSupport(*json.loads(text)) for text in texts]
    return choose(supports, group.rank(), error)


def choose(
    supports: Sequence[KernelSupport], rank: int, error: type[CommHookError]
) -> KernelChoice:
    unable = [rank for rank, support in enumerate(supports) if support.cannot]
    if len(unable) == len(supports):
        raise HookConfigError(supports[rank].cannot)
    if unable:
        raise error(
            f"ranks [{listed(unable)}] of {len(supports)} cannot run the hook that all ranks"
            f" attach: {supports[unable[0]].cannot}"
        )
    builds = {support.build for support in supports}
    arithmetic = [support.arithmetic for support in supports]
    native = len(builds) == 1 and "" not in builds
    drift = _by_rank(arithmetic) if len(set(arithmetic)) > 1 else ""
    return KernelChoice(native, _why_slower(supports), drift)


def _why_slower(supports: Sequence[KernelSupport]) -> str:
    lacking = [rank for rank, support in enumerate(supports) if support.missing]
    if lacking:  # show one reason only: the reasons may differ in the files that they name
        ranks = f"ranks [{listed(lacking)}]: " if len(supports) > 1 else ""
        return ranks + supports[lacking[0]].missing
    builds = [support.build for support in supports]
    if not builds[0] or len(set(builds)) == 1:
        return ""
    kernels = [f"native {build}" if build else "torch" for build in builds]
    described = [
        f"{kernel} ({support.arithmetic})"
        for kernel, support in zip(kernels, supports, strict=True)
    ]
    return f"the ranks' kernels differ: {_by_rank(described)}"


def _by_rank(texts: Sequence[str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(f"ranks [{listed(ranks)}]: {text}" for text, ranks in ranks_of.items())
