"""`hook=None` is DDP without a hook; `noop` is not, and says so."""

import contextlib
import io
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks import HookConfigError, request
from tests.support.ddp_steps import log_lines, mlp, process_group_of_one, train, weights, wrap
from tests.support.sharded import attached
from tests.support.training import SEVERAL_BUCKETS_MB, Run, make_model

NONE = [None, "OFF", False]  # False: what YAML makes of `off`


def _trained(hook: Any, **options: Any) -> dict[str, Any]:
    run = Run.new(hook=hook, **options).train(4)
    saved = run.save()["hook"]
    again = Run.new(hook=None)
    again.hook.load_state_dict(saved)
    return {
        "weights": run.weights(),
        "stats": run.hook.stats(),
        "plan": str(run.hook.plan()),
        "name": again.hook.name,
    }


def _all() -> dict[str, Any]:
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=SEVERAL_BUCKETS_MB)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    unhooked: Any = None
    plain = Run(ddp, optimizer, unhooked).train(4).weights()
    return {"plain": plain, **{str(hook): _trained(hook) for hook in NONE}}


def test_no_hook_is_plain_ddp(run_ranks: Any) -> None:
    for rank in run_ranks(_all):
        for hook in map(str, NONE):
            outcome = rank[hook]
            assert torch.equal(outcome["weights"], rank["plain"])
            assert outcome["stats"]["hook"] == outcome["name"] == "none"
            assert (
                outcome["stats"]["bytes_sent"] is None and outcome["stats"]["backward_passes"] == 0
            )
            assert "8 parameters, " in outcome["plan"]


def _said(hook: Any, **options: Any) -> list[str]:
    with log_lines() as lines:
        ddp = wrap(mlp())
        commhooks.attach(ddp, hook, **options)
        train(ddp, 2)
    return lines


def test_rank_0_says_once_that_there_is_no_hook(run_ranks: Any) -> None:
    (line,), others = run_ranks(_said, None)
    assert line == "commhooks: none: no hook, DDP averages the gradients itself" and others == []
    options = {
        "hook_options": {"matrix_approximation_rank": 2},
        "wrapper": "bf16",
        "check_every": 1,
    }
    (line,), others = run_ranks(_said, "off", **options)
    assert (
        line.endswith("itself (hook_options and wrapper and check_every without effect)")
        and others == []
    )


def _differently() -> tuple[str, str]:
    """Return the error if only some ranks have a hook, and the averages of replicas of shards."""
    with pytest.raises(commhooks.AttachError) as caught:
        commhooks.attach(wrap(mlp()), "powerSGD" if dist.get_rank() else None)
    return str(caught.value), attached(2, 1, None)[1].name


def test_on_some_ranks_it_is_an_error_and_shards_are_averaged_all_the_same(run_ranks: Any) -> None:
    for text, name in run_ranks(_differently):
        assert "the ranks attach different hooks: rank 0: none; rank 1: powerSGD. Give" in text
        assert name == "allreduce"


def test_a_call_that_needs_a_hook_is_an_error_without_one() -> None:
    with process_group_of_one():
        hook = commhooks.attach(wrap(mlp()), None)
        saved = commhooks.attach(wrap(mlp()), "powerSGD").state_dict()
        with pytest.raises(
            commhooks.PayloadError, match="is of hook 'powerSGD', but this hook is 'none'"
        ):
            hook.load_state_dict(saved)
    for name in ("none", "Off"):
        with pytest.raises(HookConfigError, match=f"name='{name}' means training without a hook"):
            commhooks.register_hook(name, lambda options, group: (None, print))


# ---- noop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("typo", ["nop", "noopp", "non", "nope"])
def test_noop_is_offered_to_nobody(typo: str) -> None:
    with pytest.raises(HookConfigError) as caught:
        request.HookRequest.parse(typo)
    assert "did you mean 'noop'" not in str(caught.value) and "'none' trains without a hook" in str(
        caught.value
    )


def _noop() -> dict[str, Any]:
    run = Run.new(hook="noop")
    with log_lines(level=logging.WARNING) as warned:
        run.train(2)
    saved = run.save()["hook"]
    with log_lines(level=logging.WARNING) as loaded:
        Run.new(hook="noop").hook.load_state_dict(saved)
    with log_lines(level=logging.WARNING) as unsaid, contextlib.redirect_stderr(io.StringIO()):
        quiet = Run.new(hook="noop")
        quiet.hook.quiet()
        quiet.train(1)
    return {
        "said": warned,
        "loaded": loaded,
        "unsaid": unsaid,
        "saved": saved,
        "weights": weights(run.ddp),
    }


def test_noop_warns_and_marks_what_it_saves(run_ranks: Any) -> None:
    first, other = run_ranks(_noop)
    (text,) = first["said"]
    assert "hook 'noop' averages nothing" in text and "hook=None trains without a hook" in text
    (text,) = first["loaded"]
    assert "averages nothing: the ranks had drifted apart" in text
    assert other["said"] == other["loaded"] == first["unsaid"] == []
    assert first["saved"]["replicas_equal"] is False
    assert any(
        not torch.equal(first["weights"][name], other["weights"][name]) for name in first["weights"]
    )


def test_other_hooks_mark_nothing_and_a_wrong_mark_is_damage() -> None:
    with process_group_of_one():
        hook = commhooks.attach(wrap(mlp()), "allreduce")
        saved = hook.state_dict()
        assert "replicas_equal" not in saved
        with pytest.raises(
            commhooks.PayloadError, match="'replicas_equal' is 0, not True or False"
        ):
            hook.load_state_dict(saved | {"replicas_equal": 0})
