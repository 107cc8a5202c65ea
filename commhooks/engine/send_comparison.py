"""Compare what the ranks send where a compressor of the user's own meets a new bucket layout.

gloo ends the process if the ranks of a collective send different sizes, and a rank that sends more often than the
others waits for them. Built-in compressors follow their plans; one of the user's own may have a fault.
"""

import collections
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from commhooks.comm.collectives import Send, agreement_key, gather_rows, gather_texts
from commhooks.comm.counters import Counters
from commhooks.errors import HookRunError

Started = TypeVar("Started")
_WHAT = "the comparison of what the ranks send"
_MOST = 4
"""Different things that an error shows."""


class SendComparison:
    """Compares the Sends of one backward pass, each before it is issued, in a small all-gather.

    If the ranks of `group` differ, none of them issues anything more, and the error is raised in `end`. Until then they
    take part in the rest of the pass, because ranks of `others` may wait for them.

    Args:
        group: the ranks that exchange.
        others: groups with ranks that exchange something else, and whose ranks must fail together: the node's, and
            the ranks with the other shards.
        name: of the compressor.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        others: Sequence[dist.ProcessGroup],
        name: str,
        device: torch.device,
        counters: Counters | None,
    ) -> None:
        self._group, self._others, self._name = group, others, name
        self._device, self._counters = device, counters
        self._sends_of: collections.Counter[int] = collections.Counter()
        self._problem = ""

    def issue(self, bucket: int, start: Callable[[Send], Started], send: Send) -> Started | None:
        """`start(send)`, the next Send of `bucket`, if all ranks send the same; None if they do not."""
        # What the ranks of a node send each other is the engine's own.
        return start(send) if send.over == "node" or self.agree(bucket, send) else None

    def agree(self, bucket: int, send: Send) -> bool:
        """Whether all ranks send the same as the next Send of `bucket`, and have done so before."""
        self._sends_of[bucket] += 1
        what = "splits" if send.splits is not None else f"shape {tuple(send.tensor.shape)}"  # splits may differ
        dtype = str(send.tensor.dtype).removeprefix("torch.")
        tensor = f"op={send.op!r}, {what}, {dtype}{', sparse' if send.tensor.is_sparse else ''}, last={send.last}"
        number = f"Send {self._sends_of[bucket]}"
        return self._compare(number, f" ({send.what})" if send.what else "", f" of bucket {bucket}: {tensor}")

    def end(self) -> None:
        """After the last Send of the pass.

        Raises:
            HookRunError: on all ranks, if some have sent something else than others, or more.
        """
        self._compare("no further Send", "", "")
        for group in self._others:
            failed = torch.tensor([bool(self._problem)], dtype=torch.int64, device=self._device)
            if gather_rows(failed, group, self._counters, _WHAT).any():
                self._problem = next(filter(None, gather_texts(self._problem, group, self._device, _WHAT)))
        if self._problem:
            raise HookRunError(self._problem)

    def _compare(self, number: str, label: str, rest: str) -> bool:
        """Labels may differ: they are for messages."""
        if self._problem:
            return False
        own = torch.tensor([agreement_key(number, rest)], dtype=torch.int64, device=self._device)
        keys = gather_rows(own, self._group, self._counters, _WHAT).flatten().tolist()
        if len(set(keys)) > 1:
            self._problem = self._differences(gather_texts(number + label + rest, self._group, self._device, _WHAT))
        return not self._problem

    def _differences(self, texts: list[str]) -> str:
        ranks_of: dict[str, list[int]] = {}
        for rank, text in zip(dist.get_process_group_ranks(self._group), texts, strict=True):
            ranks_of.setdefault(text, []).append(rank)
        shown = [
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in ranks_of.items()
        ]
        more = f"; and {len(shown) - _MOST} others" if len(shown) > _MOST else ""
        return (
            f"the exchange of {self._name} does not send the same on all ranks. {'; '.join(shown[:_MOST])}{more}. "
            "Every rank must yield the same Sends: their number, and op, shape, dtype and last of each, must follow "
            "from the plan and the options, not from values or from the rank"
        )
