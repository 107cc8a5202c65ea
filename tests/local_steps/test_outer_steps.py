"""What `diloco` and `local_sgd` compute and send. Their rounds: test_rounds.py; saving: test_saving.py."""

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

import commhooks
from commhooks.local_steps import fragments, outer_step
from commhooks.local_steps.fragments import divided
from commhooks.local_steps.reference import ReferenceDiLoCo
from tests.support.inside import session_of
from tests.support.training import Run, batch, flat, make_model

SEVERAL = 1000  # bytes in a bucket of weights, so that there are several


def _sgd(run: Run) -> Run:
    """With an optimizer that has no memory."""
    run.optimizer = torch.optim.SGD(run.ddp.parameters(), lr=0.05)
    return run


def _one_is_ddp() -> tuple[torch.Tensor, torch.Tensor]:
    hook = commhooks.DiLoCo(sync_every=1, wire="float32")
    return _sgd(Run.new(hook=hook)).train(8).weights(), _sgd(Run.new(hook=None)).train(8).weights()


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_outer_step_after_each_step_is_ddp(run_ranks, world_size):
    for ours, plain in run_ranks(_one_is_ddp, world_size=world_size):
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


@pytest.mark.parametrize(("world_size", "every", "start"), [(2, 3, 0), (3, 4, 2)])
def test_local_sgd_is_that_of_torch(run_ranks, world_size, every, start):
    for ours, torchs in run_ranks(_as_torch, every, start, world_size=world_size):
        assert (ours - torchs).abs().max() < 1e-6


@mock.patch.object(fragments, "BUFFER_BYTES", SEVERAL)
def _with_reference(every: int, rounds: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    run = Run.new(hook=commhooks.DiLoCo(sync_every=every, **options))
    reference = ReferenceDiLoCo(run.weights(), options["outer_lr"], options["outer_momentum"])
    alone = copy.deepcopy(run.ddp.module)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for step in range(every * rounds):
        images, labels = batch(step, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(alone(images), labels).backward()
        optimizer.step()
        if (step + 1) % every == 0:
            everyone = [torch.empty_like(run.weights()) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, flat(alone.parameters()))
            torch.nn.utils.vector_to_parameters(reference.step(everyone).float(), alone.parameters())
    run.train(every * rounds)
    return run.weights(), flat(alone.parameters()), run.hook.stats()["collectives_last_pass"]


@pytest.mark.parametrize(("wire", "bound"), [("float32", 1e-6), ("int8", 2e-3), ("int4", 3e-2)])
def test_diloco_is_that_of_the_paper(run_ranks, wire, bound):
    found = run_ranks(_with_reference, 3, 4, outer_lr=0.7, outer_momentum=0.9, wire=wire, world_size=3)
    for ours, plain, collectives in found:
        assert collectives > 1  # one for each bucket
        assert torch.equal(ours, found[0][0])
        assert (ours - plain).abs().max() < bound
        assert wire == "float32" or not torch.allclose(ours, plain, atol=1e-6)


def _streaming_reference(run: Run, every: int, fragments: int, delay: int, steps: int) -> list[torch.Tensor]:
    """This rank's weights after `steps` of Streaming DiLoCo in float32, and those of all ranks when the round ends
    early then; with plain collectives."""
    model = copy.deepcopy(run.ddp.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    parameters = list(model.parameters())
    sizes = {str(place): p.numel() for place, p in enumerate(parameters)}
    parts = [[parameters[int(name)] for name in part] for part in divided(sizes, fragments) if part]
    references = [ReferenceDiLoCo(flat(part), 0.7, 0.5) for part in parts]
    assert len(references) == fragments
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
        for turn in range(fragments):
            due = (turn + 1) * every // fragments
            if (step % every or every) == due - delay:
                send(turn)
            if (step % every or every) == due:
                arrive(turn)
    own = flat(model.parameters())
    for turn in list(sent):
        arrive(turn)
    for turn in range(fragments):
        send(turn)
        arrive(turn)
    return [own, flat(model.parameters())]


@mock.patch.object(fragments, "BUFFER_BYTES", SEVERAL)
def _streaming(every: int, fragments: int, delay: int, steps: int) -> Any:
    options = {"outer_lr": 0.7, "outer_momentum": 0.5, "fragments": fragments, "delay": delay}
    run = Run.new(hook=commhooks.DiLoCo(sync_every=every, wire="float32", **options))
    plain = _streaming_reference(run, every, fragments, delay, steps)
    ours = [run.train(steps).weights()]
    run.hook.synchronize()
    return [*ours, run.weights()], plain


# The last two end with a part on its way.
@pytest.mark.parametrize(
    ("every", "fragments", "delay", "steps"), [(4, 2, 0, 13), (6, 2, 2, 20), (6, 3, 1, 19), (4, 1, 3, 10)]
)
def test_streaming_is_that_of_the_paper(run_ranks, every, fragments, delay, steps):
    found = run_ranks(_streaming, every, fragments, delay, steps, world_size=3)
    for ours, plain in found:
        for one, other in zip(ours, plain, strict=True):
            assert (one - other).abs().max() < 1e-6
        assert torch.equal(ours[1], found[0][0][1])


class _Mocked(nn.Module):
    """Two layers of one weight, whose gradients are always 2."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))])

    def forward(self) -> torch.Tensor:
        return 2 * (self.layers[0] + self.layers[1]).sum()


def _mocked(steps: int) -> list[list[float]]:
    model = DistributedDataParallel(_Mocked())
    config = commhooks.DiLoCo(sync_every=6, fragments=2, outer_lr=2.0, wire="float32")
    hook = commhooks.attach(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    history = []
    for _ in range(steps):
        history.append([layer.item() for layer in model.module.layers])
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    assert hook.stats()["step"] == 5  # three of the first layer, two of the second
    return [list(each) for each in zip(*history, strict=True)]


def test_the_regression_fixture_of_torchft(run_ranks):
    """Of its test of mocked updates: two fragments, no delay (`diloco_regression_test.py`, October 2025). With a delay
    it does not keep what was trained in the meantime."""
    fixture = [
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
    ]
    assert run_ranks(_mocked, 16) == [fixture, fixture]


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
        assert stats["bytes_uncompressed"] == 9 * 4 * sum(p.numel() for p in make_model().parameters())


def _kept(config: commhooks.HookConfig) -> tuple[dict[str, int], Any]:
    run = Run.new(hook=config).train(config.sync_every)
    state = session_of(run.hook).state
    return {key: sum(each.nbytes for each in state[key].values()) for key in state.entries}, run.hook.plan().memory


@pytest.mark.parametrize("config", [commhooks.DiLoCo(outer_momentum=0.5), commhooks.LocalSGD()])
def test_the_plan_knows_what_is_kept(run_ranks, config):
    for kept, planned in run_ranks(_kept, config):
        residual = kept.pop("residual", 0)
        assert sum(kept.values()) == planned.factors and set(kept) >= {"anchor"}
        assert residual == pytest.approx(planned.residual, rel=0.02)  # padding of blocks
        assert planned.copies >= kept["anchor"] > planned.packed


@mock.patch.object(outer_step, "SAMPLED_EVERY", 1)
@mock.patch.object(fragments, "BUFFER_BYTES", SEVERAL)
def _measured() -> Any:
    run = _sgd(Run.new(hook=commhooks.DiLoCo(sync_every=2, wire="float32")))
    anchors, found = [run.weights()], []
    for _ in range(3):
        anchors.append(run.train(2).weights())
        stats = run.hook.stats()
        found.append((stats["outer_gradient_norm"], stats["outer_gradient_cosine"]))
    with torch.no_grad():
        run.ddp.module[0].weight.fill_(torch.inf)  # discarded: the next is compared with the one before
    run.train(2)
    anchors.append(run.train(2).weights())
    stats = run.hook.stats()
    return anchors, [*found, (stats["outer_gradient_norm"], stats["outer_gradient_cosine"])], stats["nonfinite_steps"]


def test_norm_and_cosine_of_outer_gradients(run_ranks):
    for anchors, found, discarded in run_ranks(_measured):
        moved = [one - other for one, other in itertools.pairwise(anchors)]
        assert [norm for norm, _ in found] == pytest.approx([float(each.norm()) for each in moved], rel=1e-4)
        cosines = [float(torch.cosine_similarity(*each, dim=0)) for each in itertools.pairwise(moved)]
        assert found[0][1] is None and discarded == 1
        assert [cosine for _, cosine in found[1:]] == pytest.approx(cosines, rel=1e-4)


def _late(start: int) -> Any:
    late, plain = Run.new(hook=commhooks.DiLoCo(sync_every=3, start_iter=start)), Run.new(hook="allreduce")
    late.train(start)
    plain.train(start)
    same = torch.equal(late.weights(), plain.weights())
    late.train(2)
    return same, late.weights(), late.hook.stats()


def test_the_first_steps_average_gradients(run_ranks):
    first, second = run_ranks(_late, 4)
    assert first[0] and second[0]
    assert not torch.equal(first[1], second[1])
    assert first[2]["bytes_sent"] == 4 * 4 * sum(p.numel() for p in make_model().parameters())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sync_every": 0}, "sync_every=0; expected a number of steps, 1 or more"),
        ({"outer_lr": 0.0}, "outer_lr=0.0; expected a number above 0"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0; expected a number from 0"),
        ({"wire": "int2"}, "wire='int2'; expected one of 'float32', 'int8', 'int4'"),
        ({"fragments": 0}, "fragments=0; expected a number of parts, 1 or more"),
        ({"sync_every": 5, "fragments": 2}, "sync_every=5; expected a multiple of fragments=2"),
        ({"sync_every": 6, "fragments": 2, "delay": 3}, "delay=3; expected 0 up to 2: the next turn comes 3 steps"),
        ({"delay": -1}, "delay=-1; expected 0 up to 4"),
        ({"start_iter": 1.5}, "start_iter=1.5; expected a fraction"),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(commhooks.HookConfigError, match=text):
        commhooks.DiLoCo(**options)


def test_a_wrapper_is_refused():
    from commhooks.request import HookRequest

    with pytest.raises(commhooks.HookConfigError, match="what to send: omit wrapper and set its option wire$"):
        HookRequest.parse("diloco", wrapper="bf16")
