"""FSDP2's all-gather of a unit's weights, compressed.

    own row        this rank's shard, in the dtype in which the model computes
    message        its codes
    all rows       decoded from the messages of all ranks, this rank's own as well

so that all ranks compute with the same weights, which are the rounded ones. The optimizer changes
the shard from which the row was copied, and which keeps all of its digits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commhooks.comm.collectives import ALL_GATHER
from commhooks.errors import HookRunError
from commhooks.gradients import precision
from commhooks.gradients.profiling import span
from commhooks.sharded.codec import Codec
from commhooks.sharded.memory import Memory
from commhooks.sharded.routes import Route
from commhooks.sharded.traffic import Traffic


class GatherWeights:
    """Takes the place of `AllGather` in torch.distributed.fsdp: `set_custom_all_gather`.

    Args:
        unit: name of the unit, for messages.
        ranks: number of ranks that share the unit.
        codec: None: send the weights as they are.
        memory: for the messages of all ranks, until they are decoded.
    """

    def __init__(
        self,
        unit: str,
        ranks: int,
        codec: Codec | None,
        route: Route,
        memory: Memory,
        traffic: Traffic,
    ) -> None:
        self._what = f"weights of {unit}"
        self._ranks = ranks
        self._codec = codec
        self._route = route
        self._memory = memory
        self._traffic = traffic

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Fill `output_tensor` (`ranks * numel`) with the rows of all ranks. The current stream
        waits, or with `async_op` the stream on which `wait` of the result is called.

        On the CPU there is no stream that could wait, so FSDP2 always gets a result to wait for:
        the messages travel while it computes, wherever it gathers ahead (torch 2.13: it waits for
        every `Work` that it gets, before it reads the weights).
        """
        self._traffic.begin_gather(output_tensor)
        among_fewer = group.size() != self._ranks  # after a forward pass: reshard_after_forward=N
        if self._codec is None or among_fewer:
            self._traffic.sent_whole(output_tensor, inside=among_fewer)
            whole = getattr(dist, ALL_GATHER)
            return whole(output_tensor, input_tensor, group=group, async_op=async_op)
        rows = output_tensor.view(self._ranks, -1)
        self._check(rows)
        own_row = rows[group.rank()]  # FSDP2 passes this view of its output as `input_tensor`
        if own_row.data_ptr() != input_tensor.data_ptr():
            own_row.copy_(input_tensor)
        with span("gather", self._what):
            finish = self._send(self._codec, own_row, rows, group)
        if async_op or precision.is_host_readable(rows.device):
            return Finishing(finish)
        finish()
        return None

    def _send(
        self, codec: Codec, own_row: torch.Tensor, rows: torch.Tensor, group: dist.ProcessGroup
    ) -> Callable[[], None]:
        buffer = self._memory.take()
        size = self._ranks * codec.message_bytes
        messages = buffer[:size].view(self._ranks, codec.message_bytes)
        clocks = self._traffic.counters.clocks
        places = self._route.places
        with clocks.measure(rows.device):
            place = places[group.rank()]
            codec.encode(own_row.unsqueeze(0), messages[place : place + 1])
            wait = self._route.gather(messages, group, self._what)

        def finish() -> None:
            with clocks.measure(rows.device):
                wait()
                if places == range(self._ranks):
                    codec.decode(messages, rows)
                else:
                    for place, row in zip(places, rows, strict=True):
                        codec.decode(messages[place : place + 1], row.unsqueeze(0))
                self._memory.give_back(buffer)

        return finish

    def _check(self, rows: torch.Tensor) -> None:
        assert self._codec is not None
        layout = self._codec.layout
        if rows.shape[1] != layout.numel or rows.dtype != layout.dtype:
            raise HookRunError(
                f"fully_shard gathers {rows.shape[1]} elements of {rows.dtype} per rank for the"
                f" {self._what}, and {layout.numel} of {layout.dtype} were expected: call"
                " hook.detach() before the parameters of a model are replaced or cast, and attach"
                " a hook again"
            )


class Finishing(dist.Work):
    """A collective that is finished by `wait`. FSDP2 waits before it reads the weights."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: Any = None) -> bool:
        finish = self._finish
        self._finish = None
        if finish is not None:
            finish()
        return True
