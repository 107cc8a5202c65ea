"""What `diloco` and `local_sgd` compute and send. Their rounds: test_rounds.py; saving:
test_saving.py.
"""

import copy
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import commhooks
from commhooks.local_steps import flat_weights, outer_step
from commhooks.local_steps.compressor import DiLoCoCompressor
from commhooks.local_steps.flat_weights import divided
from commhooks.local_steps.outer_step import ANCHOR
from commhooks.local_steps.reference import ReferenceDiLoCo
from tests.compressors.quantized.quantized_oracle import OracleRanks
from tests.support.simulation import SimulatedRanks
from tests.support.training import Run, batch, flat, make_model

SEVERAL = 1000  # bytes in a bucket of weights, so that there are several


def _sgd(run: Run) -> Run:
    """With an optimizer that has no memory."""
    run.optimizer = torch.optim.SGD(run.ddp.parameters(), lr=0.05)
    return run


def _one_is_ddp() -> tuple[torch.Tensor, torch.Tensor]:
    hook = commhooks.DiLoCo(sync_every=1, wire="float32")
    return _sgd(Run.new(hook=hook)).train(8).weights(), _sgd(Run.new(hook=None)).train(8).weights()


def test_an_outer_step_after_each_step_is_ddp(run_ranks):
    for ours, plain in run_ranks(_one_is_ddp, world_size=3):
        assert (ours - plain).abs().max() < 1e-6


def _as_torch(every: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    steps = start + 3 * every
    ours = Run.new(hook=commhooks.LocalSGD(sync_every=every, start_iter=start)).train(steps)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    averager = PeriodicModelAverager(period=every)
    for step in range(steps):
        images, labels = batch(step, dist.get_rank())
        optimizer.zero_grad()
        if step < start:
            nn.functional.cross_entropy(model(images), labels).backward()
        else:
            nn.functional.cross_entropy(model.module(images), labels).backward()
        optimizer.step()
        if step >= start:
            averager.step += 1 if averager.step == 0 else 0  # it would average at its step 0
            averager.average_parameters(model.parameters())
    return ours.weights(), flat(model.parameters())


@pytest.mark.parametrize(("every", "start"), [(3, 0), (4, 2)])
def test_local_sgd_is_that_of_torch(run_ranks, every, start):
    for ours, torchs in run_ranks(_as_torch, every, start):
        assert (ours - torchs).abs().max() < 1e-6


def _reference(run: Run, every: int, count: int, delay: int, steps: int) -> list[torch.Tensor]:
    """The weights of this rank after `steps` of Streaming DiLoCo in float32, and of all ranks after
    an early end of the round; with plain collectives.
    """
    model = copy.deepcopy(run.ddp.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    parameters = list(model.parameters())
    sizes = {str(place): p.numel() for place, p in enumerate(parameters)}
    parts = [[parameters[int(name)] for name in part] for part in divided(sizes, count) if part]
    references = [ReferenceDiLoCo(flat(part), 0.7, 0.5) for part in parts]
    assert len(references) == count
    sent: dict[int, torch.Tensor] = {}

    def send(turn: int) -> None:
        sent[turn] = flat(parts[turn])

    def arrive(turn: int) -> None:
        then = sent.pop(turn)
        everyone = [torch.empty_like(then) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, then)
        merged = references[turn].step(everyone).float() + (flat(parts[turn]) - then)
        torch.nn.utils.vector_to_parameters(merged, parts[turn])

    for step in range(1, steps + 1):
        images, labels = batch(step - 1, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        for turn in range(count):
            due = (turn + 1) * every // count
            if (step % every or every) == due - delay:
                send(turn)
            if (step % every or every) == due:
                arrive(turn)
    own = flat(model.parameters())
    for turn in list(sent):
        arrive(turn)
    for turn in range(count):
        send(turn)
        arrive(turn)
    return [own, flat(model.parameters())]


@mock.patch.object(flat_weights, "BUFFER_BYTES", SEVERAL)
def _ours_and_the_papers(wire: str, every: int, parts: int, delay: int, steps: int) -> Any:
    options = {
        "outer_lr": 0.7,
        "outer_momentum": 0.5,
        "fragments": parts,
        "delay": delay,
        "wire": wire,
    }
    run = Run.new(hook=commhooks.DiLoCo(sync_every=every, **options))
    plain = _reference(run, every, parts, delay, steps)
    ours = [run.train(steps).weights()]
    run.hook.synchronize()
    return [*ours, run.weights()], plain, run.hook.stats()["collectives_last_pass"]


@pytest.mark.parametrize(
    ("wire", "bound", "every", "parts", "delay", "steps"),
    [
        ("float32", 1e-6, 3, 1, 0, 13),
        ("int8", 2e-3, 3, 1, 0, 13),
        ("int4", 3e-2, 3, 1, 0, 13),
        ("float32", 1e-6, 6, 2, 2, 20),
        # These end with a fragment in flight.
        ("float32", 1e-6, 6, 3, 1, 19),
        ("float32", 1e-6, 4, 1, 3, 10),
    ],
)
def test_diloco_is_that_of_the_papers(run_ranks, wire, bound, every, parts, delay, steps):
    found = run_ranks(_ours_and_the_papers, wire, every, parts, delay, steps, world_size=3)
    for ours, plain, collectives in found:
        assert collectives > 1  # one for each buffer
        for one, other in zip(ours, plain, strict=True):
            assert (one - other).abs().max() < bound
            assert wire == "float32" or not torch.allclose(one, other, atol=1e-6)
        assert torch.equal(ours[1], found[0][0][1])


@pytest.mark.parametrize(
    ("wire", "levels", "block"),
    [
        ("float32", 0, 1),
        ("int8", 127, commhooks.Int8Compress().block_size),
        ("int4", 7, commhooks.Int4Compress().block_size),
    ],
)
def test_outer_steps_are_torchs_sgd_on_what_error_feedback_sends(wire, levels, block):
    """Like other implementations of DiLoCo: torch's SGD steps a copy of the weights, and the mean
    difference is its gradient. With a quantised wire a rank sends e + difference, rounded, and e
    keeps the rest.
    """
    config = commhooks.DiLoCo(wire=wire, outer_lr=0.7, outer_momentum=0.9)
    shared = {
        name: torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for name, shape in {"w": (24, 40), "b": (9,)}.items()
    }
    ranks = SimulatedRanks(lambda: DiLoCoCompressor(config), 3, shared)
    for state in ranks.states:
        state[ANCHOR.key].update({name: w.flatten().clone() for name, w in shared.items()})
    rounded = {"w": shared["w"].numel()} if levels else {}
    feedback = OracleRanks(3, levels, block, rounded)
    outer = torch.optim.SGD(shared.values(), lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(5):
        trained = [
            {name: w + 0.1 * torch.randn_like(w) for name, w in shared.items()} for _ in range(3)
        ]
        differences = [
            {name: (shared[name] - w).flatten().tolist() for name, w in of_rank.items()}
            for of_rank in trained
        ]
        for name, mean in feedback.step(differences).items():
            shared[name].grad = torch.tensor(mean, dtype=torch.float64).view_as(shared[name])
        outer.step()
        buckets = [parameters_to_vector(of_rank.values()) for of_rank in trained]
        assert ranks.step(buckets)
        for bucket in buckets:
            torch.testing.assert_close(bucket, flat(shared.values()), rtol=0, atol=1e-13)


def _bytes_of_passes(every: int, passes: int) -> tuple[list[int], dict[str, Any], int]:
    run = Run.new(hook=commhooks.DiLoCo(sync_every=every))
    sent = []
    for _ in range(passes):
        before = run.hook.stats()["bytes_sent"]
        run.train(1)
        sent.append(run.hook.stats()["bytes_sent"] - before)
    return sent, run.hook.stats(), run.hook.plan().bytes_after


def test_nothing_is_sent_between_two_outer_steps(run_ranks):
    for sent, stats, planned in run_ranks(_bytes_of_passes, 4, 9):
        assert sent[:3] == sent[4:7] == [0, 0, 0] and sent[8] == 0
        assert sent[3] == sent[7] > 0
        assert planned - 8 <= sent[3] / 4 <= planned * 1.03  # flags, and the padding of the shares
        assert stats["backward_passes"] == 9 and stats["step"] == 2
        assert stats["step_in_round"] == 1 and stats["outer_gradient_norm"] > 0.01
        assert stats["bytes_uncompressed"] == 9 * 4 * sum(
            p.numel() for p in make_model().parameters()
        )


def _kept(config: commhooks.HookConfig) -> tuple[dict[str, int], Any]:
    run = Run.new(hook=config).train(config.sync_every)
    state = run.hook._hook.driver.outer.state
    return {
        key: sum(each.nbytes for each in state[key].values()) for key in state.entries
    }, run.hook.plan().memory


@pytest.mark.parametrize("config", [commhooks.DiLoCo(outer_momentum=0.5), commhooks.LocalSGD()])
def test_the_plan_knows_what_is_kept(run_ranks, config):
    for kept, planned in run_ranks(_kept, config):
        residual = kept.pop("residual", 0)
        assert sum(kept.values()) == planned.factors and set(kept) >= {"anchor"}
        assert residual == pytest.approx(planned.residual, rel=0.02)  # padding of blocks
        assert planned.copies >= kept["anchor"] > planned.packed


@mock.patch.object(outer_step, "SAMPLED_EVERY", 1)
@mock.patch.object(flat_weights, "BUFFER_BYTES", SEVERAL)
def _measured() -> Any:
    run = _sgd(Run.new(hook=commhooks.DiLoCo(sync_every=2, wire="float32")))
    anchors, found = [run.weights()], []
    for _ in range(3):
        anchors.append(run.train(2).weights())
        stats = run.hook.stats()
        found.append((stats["outer_gradient_norm"], stats["outer_gradient_cosine"]))
    with torch.no_grad():
        # discarded: the next is compared with the one before
        run.ddp.module[0].weight.fill_(torch.inf)
    run.train(2)
    anchors.append(run.train(2).weights())
    stats = run.hook.stats()
    return (
        anchors,
        [*found, (stats["outer_gradient_norm"], stats["outer_gradient_cosine"])],
        stats["nonfinite_steps"],
    )


def test_norm_and_cosine_of_outer_gradients(run_ranks):
    for anchors, found, discarded in run_ranks(_measured):
        moved = [one - other for one, other in itertools.pairwise(anchors)]
        assert [norm for norm, _ in found] == pytest.approx(
            [float(each.norm()) for each in moved], rel=1e-4
        )
        cosines = [
            float(torch.cosine_similarity(*each, dim=0)) for each in itertools.pairwise(moved)
        ]
        assert found[0][1] is None and discarded == 1
        assert [cosine for _, cosine in found[1:]] == pytest.approx(cosines, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync_every": 0}, "sync_every=0; expected a number of steps, 1 or more"),
        ({"outer_lr": 0.0}, "outer_lr=0.0; expected a number above 0"),
        ({"lr_factor": 0.0}, "lr_factor=0.0; expected a number above 0, or None"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0; expected a number from 0"),
        ({"wire": "int2"}, "wire='int2'; expected one of 'float32', 'int8', 'int4'"),
        ({"fragments": 0}, "fragments=0; expected a number of parts, 1 or more"),
        ({"sync_every": 5, "fragments": 2}, "sync_every=5; expected a multiple of fragments=2"),
        (
            {"sync_every": 6, "fragments": 2, "delay": 3},
            "delay=3; expected 0 up to 2: the next turn comes 3 steps",
        ),
        ({"delay": -1}, "delay=-1; expected 0 up to 4"),
        ({"start_iter": 1.5}, "start_iter=1.5; expected a fraction"),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(commhooks.HookConfigError, match=text):
        commhooks.DiLoCo(**options)


def test_a_wrapper_is_refused():
    from commhooks.request import HookRequest

    with pytest.raises(
        commhooks.HookConfigError, match="what it sends: omit wrapper and set its option wire$"
    ):
        HookRequest.parse("diloco", wrapper="bf16")
