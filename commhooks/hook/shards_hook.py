"""`ShardsHook`: compressed collectives of FSDP2 as a `Hook`, if no other hook averages."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from commhooks.checkpoint.user_state import UserStateCheckpointer
from commhooks.comm.groups import is_logging_rank
from commhooks.engine.consensus import Binding
from commhooks.engine.kernel_choice import KernelChoice
from commhooks.gradients.layout import Bucket
from commhooks.gradients.source import Future, GradientSource, PassListener
from commhooks.hook.kinds import Prepared
from commhooks.hook.protocol import Residuals
from commhooks.hook.sharded_source import sharded_source
from commhooks.hook.shards_plan import NAME, shards_plan, shards_summary
from commhooks.plan import ModelPlan
from commhooks.report import Status, Summary
from commhooks.request import HookRequest
from commhooks.sharded.attached import AttachedShards
from commhooks.sharded.source import OneReplica


def prepare(
    request: HookRequest, source: GradientSource, binding: Binding, total_steps: int | None
) -> Prepared:
    def build(choice: KernelChoice) -> ShardsHook:
        assert isinstance(source, OneReplica)
        hook = ShardsHook(attach_shards(request, source), source)
        source.passes = hook.shards.attached.passes
        return hook

    return Prepared(None, build)


def source_without_replicas(
    model: torch.nn.Module, process_group: dist.ProcessGroup | None
) -> GradientSource:
    assert isinstance(model, FSDPModule)
    return sharded_source(model, process_group, None, one_replica=True, kind=OneReplica)


def attach_shards(request: HookRequest, source: GradientSource) -> "ModelShards":
    """Replace the collectives of the model. All ranks that share it must call this."""
    assert request.shards is not None and source.module is not None
    assert source.shard_group is not None  # `check_arrangement`
    logs = is_logging_rank(source.group, source.shard_group)
    attached = AttachedShards(
        request.shards, source.module, source.shard_group, source.device, logs=logs
    )
    return ModelShards(attached, alone=request.shards_alone)


class ModelShards:
    """What `CommHook` asks of compressed collectives. `alone`: no other hook averages."""

    def __init__(self, attached: AttachedShards, *, alone: bool) -> None:
        self.attached = attached
        self._alone = alone
        self.stats = attached.stats
        self.detach = attached.detach

    def summary(self) -> str:
        return shards_summary(self.attached.codecs)

    def plan(self) -> ModelPlan:
        return shards_plan(self.attached.codecs)

    def with_plan(self, plan: ModelPlan) -> ModelPlan:
        return plan if self._alone else dataclasses.replace(plan, shards=self.plan())


class ShardsHook:
    members = None

    def __init__(self, shards: ModelShards, source: GradientSource) -> None:
        self.shards = shards
        self.counters = shards.attached.traffic.counters
        self._names = source.names
        self.checkpointer = UserStateCheckpointer(NAME, self._options, self.counters, source.group)

    @property
    def _options(self) -> dict[str, Any]:
        options = dataclasses.asdict(self.shards.attached.codecs.options)
        return options | {"exclude": list(options["exclude"])}

    def run(self, bucket: Bucket) -> Future:
        raise AssertionError("FSDP2 reduces the gradients")

    def end_pass(self) -> None:
        return None

    def listeners(self, *, logs: bool) -> list[PassListener]:
        return []

    def status(self) -> Status:
        return Status(self._options, use=None, counts_bytes=True)

    def stats(self) -> dict[str, Any]:
        return {"step": self.checkpointer.step, "kernel": self.shards.stats()["kernel"]}

    def summary(self) -> Summary:
        return Summary(alone=None)  # `CommHook` logs the line of the shards

    def warnings(self) -> list[str]:
        attached = self.shards.attached
        if not self.plan().compressed:
            return [
                f"{NAME} ({attached.codecs.options.label}) compresses no parameter of this model:"
                " print(hook.plan()) gives the reasons."
            ]
        return [f"{NAME} computes with the kernel 'torch'. {attached.slower}"] * bool(
            attached.slower
        )

    def plan(self) -> ModelPlan:
        return self.shards.plan()

    @contextlib.contextmanager
    def residuals(self) -> Iterator[Residuals]:
        yield Residuals({}, 1.0, self._names.named_parameters())

    def synchronize(self, limit_s: float, *, optimizers: bool) -> bool:
        return True

    def close(self) -> None:
        return None
