"""All ranks are told which Send differs between them, where gloo would hang or abort."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

import commhooks
from tests.support.sharded import attached, random_gradients
from tests.support.training import SEVERAL_BUCKETS_MB, Run

pytestmark = pytest.mark.timeout(120)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(commhooks.HookConfig):
    """Of a test."""

    hook_name: ClassVar[str] = "own"
    fault: str = ""
    rank: int = 1
    step: int = 1

    def fault_at(self, step: int) -> str:
        return self.fault if (dist.get_rank(), step) == (self.rank, self.step) else ""


class OwnCompressor(commhooks.Compressor[Own]):
    """The mean, in two Sends, but for the fault on one rank."""

    Config = Own

    def plan_parameter(self, info: commhooks.ParameterInfo) -> commhooks.UnitPlan:
        plan = commhooks.UnitPlan.uncompressed(info, "")
        return dataclasses.replace(plan, compressed=True, numel_compressed=info.numel)

    def exchange(self, flat: Any, work: Any, state: Any, step: Any) -> Any:
        fault = self.config.fault_at(step.number)
        first = flat.clone()
        second = torch.ones(6)
        op = "sum"
        last = True
        if fault == "shape" and len(flat) == 576:  # the second bucket
            second = torch.ones(7)
        elif fault == "dtype":
            first = first.double()
        elif fault == "op":
            op = "max"
        elif fault == "last":
            last = False
        reduced = yield commhooks.Send(first.div_(step.world_size), what="mean")
        flat.copy_(reduced)
        ones = yield commhooks.Send(second, what="ones", op=op, last=last)
        if fault == "one more":
            yield commhooks.Send(torch.ones(2), what="more", last=True)
        yield commhooks.Verdict(ones.isfinite().all())


class OwnAtOnceCompressor(OwnCompressor):
    """Without learned state: one Send."""

    transactional = False

    def exchange(self, flat: Any, work: Any, state: Any, step: Any) -> Any:
        fault = self.config.fault_at(step.number)
        if fault == "nothing":
            return flat
        sent = flat.div_(step.world_size)
        return (
            yield commhooks.Send(
                sent.double() if fault == "dtype" else sent, what="mean", last=True
            )
        )


def _error_of(train: Callable[[], object]) -> str:
    with pytest.raises(commhooks.HookRunError) as caught:
        train()
    dist.barrier()  # no rank waits for another one
    return str(caught.value)


def _with_ddp(fault: str, compressor: type[OwnCompressor], **attach: Any) -> str:
    """The fault is in the second pass, for which DDP has made several buckets."""
    commhooks.register_compressor(compressor)
    run = Run.new(hook=Own(fault=fault), bucket_cap_mb=SEVERAL_BUCKETS_MB, **attach).train(1)
    return _error_of(lambda: run.train(1))


@pytest.mark.parametrize(
    ("fault", "rank_1", "others"),
    [
        (
            "shape",
            r"rank 1: Send 2 \(ones\) of bucket 1: op='sum', shape \(7,\), float32, last=True",
            r"shape \(6,\)",
        ),
        (
            "dtype",
            r"rank 1: Send 1 \(mean\) of bucket 0: .*, float64, last=False",
            "float32, last=False",
        ),
        ("op", r"rank 1: Send 2 \(ones\) of bucket 0: op='max'", "op='sum'"),
        ("last", r"rank 1: Send 2 \(ones\) of bucket 0: .*, last=False", "last=True"),
        ("one more", r"rank 1: Send 3 \(more\) of bucket 0: ", "no further Send"),
    ],
)
def test_the_send_is_named_on_all_ranks(
    run_ranks: Any, fault: str, rank_1: str, others: str
) -> None:
    for text in run_ranks(_with_ddp, fault, OwnCompressor, world_size=3):
        assert text.startswith(
            "the exchange of own does not send the same on all ranks. ranks 0, 2: "
        )
        assert re.search(rank_1, text) and re.search(f"ranks 0, 2: [^;]*{others}", text), text


@pytest.mark.parametrize(
    ("fault", "ranks"),
    [
        (
            "dtype",
            (
                "rank 0: Send 1 (mean) of bucket 0: op='sum', shape (274,), float32, last=True;"
                " rank 1: Send 1 (mean)"
            ),
        ),
        (
            "nothing",
            (
                "rank 0: Send 1 (mean) of bucket 0: op='sum', shape (274,), float32, last=True;"
                " rank 1: no further"
            ),
        ),
    ],
)
def test_a_compressor_without_learned_state_is_told_too(
    run_ranks: Any, fault: str, ranks: str
) -> None:
    for text in run_ranks(_with_ddp, fault, OwnAtOnceCompressor):
        assert ranks in text


@pytest.mark.parametrize("compressor", [OwnCompressor, OwnAtOnceCompressor])
def test_between_nodes_the_other_ranks_fail_too(
    run_ranks: Any, compressor: type[OwnCompressor]
) -> None:
    """Ranks 0 and 2 send the same, ranks 1 and 3 do not."""
    for text in run_ranks(_with_ddp, "dtype", compressor, world_size=4, ranks_per_node=2):
        assert (
            "rank 1: Send 1 (mean) of bucket 0" in text
            and "rank 3: Send 1 (mean) of bucket 0" in text
        )


def _with_fully_shard(compressor: type[OwnCompressor]) -> str:
    commhooks.register_compressor(compressor)
    model, _ = attached(2, 2, Own(fault="dtype", rank=2, step=0), dtype=torch.float32)
    return _error_of(lambda: model(random_gradients(0, dtype=torch.float32)).backward())


@pytest.mark.parametrize("compressor", [OwnCompressor, OwnAtOnceCompressor])
def test_with_fully_shard_the_other_shards_fail_too(
    run_ranks: Any, compressor: type[OwnCompressor]
) -> None:
    """Ranks 1 and 3, with one shard, send the same; ranks 0 and 2 do not."""
    for text in run_ranks(_with_fully_shard, compressor, world_size=4):
        assert (
            "rank 0: Send 1 (mean) of bucket 0" in text
            and "rank 2: Send 1 (mean) of bucket 0" in text
        )


def _gathered(compressor: type[OwnCompressor]) -> list[int]:
    """The all-gathers for comparisons of each step."""
    commhooks.register_compressor(compressor)
    run = Run.new(hook=Own(), bucket_cap_mb=SEVERAL_BUCKETS_MB)
    counts = []
    for _ in range(4):
        before = run.hook.stats()["handshakes"]
        run.train(1)
        counts.append(run.hook.stats()["handshakes"] - before)
    return counts


@pytest.mark.parametrize("compressor", [OwnCompressor, OwnAtOnceCompressor])
def test_nothing_is_compared_again(run_ranks: Any, compressor: type[OwnCompressor]) -> None:
    for first, second, *later in run_ranks(_gathered, compressor):
        assert first > 0 and second > 0 and later == [0, 0]
