"""`exclude`: parameters that are never compressed, by globs on their names."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commhooks
from commhooks import PowerSGD
from commhooks.gradients.names import matching
from tests.support.ddp_steps import (
    local_gradients,
    log_lines,
    mean_over_ranks,
    process_group_of_one,
    residuals,
    wrap,
)
from tests.support.inside import session_of


class Net(nn.Module):
    """An embedding, whose weight is tied to the last layer's, and a matrix in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 32)
        self.middle = nn.Linear(32, 32)
        self.Embed2 = nn.Linear(32, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.Embed2(self.middle(self.embed(words)))).tanh())


def attach(ddp: Any, *patterns: str) -> commhooks.CommHook:
    return commhooks.attach(ddp, PowerSGD(start_powerSGD_iter=0, exclude=list(patterns)))


def step(model: nn.Module) -> None:
    words = torch.randint(50, (8, 5), generator=torch.Generator().manual_seed(dist.get_rank()))
    model.zero_grad(set_to_none=True)
    model(words).square().mean().backward()


@pytest.mark.parametrize(
    "names, patterns, matched",
    [
        (["a.embed.weight"], ["*embed*"], "*embed*"),
        (["a.Embed.weight"], ["*embed*"], None),
        (["a.embed.weight"], ["embed*"], None),
        (["h.1.w", "h.10.w"], ["h.?.w"], "h.?.w"),
        (["h.10.w"], ["h.?.w", "h.[0-9]*"], "h.[0-9]*"),
        (["wte.weight", "lm_head.weight"], ["lm_head*"], "lm_head*"),
        (["a"], [], None),
    ],
)
def test_globs_match_names_of_parameters(names, patterns, matched):
    assert matching(names, patterns) == matched


def _train() -> dict[str, Any]:
    ddp = wrap(Net())
    hook = attach(ddp, "*embed*")
    exact = True
    for _ in range(3):
        alone = local_gradients(ddp, step)
        step(ddp)
        mean = mean_over_ranks(alone["embed.weight"])
        exact = exact and torch.equal(ddp.module.embed.weight.grad, mean)
        middle = mean_over_ranks(alone["middle.weight"])
    difference = float((ddp.module.middle.weight.grad - middle).norm() / middle.norm())
    saved = hook.state_dict("per_rank")
    return {
        "exact": exact,
        "difference": difference,
        "residuals": set(residuals(hook)),
        "q": {name for name, entry in saved["parameters"].items() if entry["q"] is not None},
        "options": saved["options"],
        "steps": hook.stats()["compressed_steps"],
        "sent": hook.stats()["bytes_sent_last_pass"],
        "planned": hook.plan().bytes_after,
        "reasons": {p.name: p.reason for p in hook.plan().parameters},
        "table": str(hook.plan()),
    }


def test_what_is_excluded_is_averaged_exactly(run_ranks: Any) -> None:
    for rank in run_ranks(_train):
        assert rank["steps"] == 3 and rank["exact"] and rank["difference"] > 1e-3
        assert rank["residuals"] == rank["q"] == {"middle.weight", "Embed2.weight"}  # case matters
        assert rank["reasons"]["embed.weight"] == "excluded by '*embed*'"
        assert "excluded by '*embed*'" in rank["table"]
        assert rank["sent"] == rank["planned"] + 4 * 2  # a flag per matrix
        assert (
            rank["options"]["exclude"] == ["*embed*"] and type(rank["options"]["exclude"]) is list
        )


def _different() -> tuple[str, list[str]]:
    with pytest.raises(commhooks.AttachError) as caught:
        attach(wrap(Net()), "*embed*" if dist.get_rank() else "*middle*")
    with log_lines() as lines:
        attach(wrap(Net()), "*embd*", "froz*", "head*")
    return str(caught.value), [line for line in lines if line.startswith("commhooks: exclude:")]


def test_ranks_must_exclude_the_same_and_rank_0_warns(run_ranks: Any) -> None:
    results = run_ranks(_different)
    for text, _ in results:
        assert "rank 0: exclude=['*middle*']; rank 1: exclude=['*embed*']" in text
    (warning,) = results[0][1]
    # A frozen parameter and the second name of a tied one are matches.
    assert (
        "no parameter of the model matches '*embd*' (the closest name is 'embed.weight')" in warning
    )
    assert "froz" not in warning and "head" not in warning and results[1][1] == []


def test_a_resume_with_other_exclusions_works():
    with process_group_of_one():
        ddp = wrap(Net())
        hook = attach(ddp)
        for _ in range(2):
            step(ddp)
        saved = hook.state_dict()
        assert saved["parameters"]["embed.weight"]["q"] is not None
        other = wrap(Net())
        resumed = attach(other, "*embed*")
        with log_lines() as lines:
            resumed.load_state_dict(saved)
        assert any(
            "no longer compresses these parameters" in line and "embed.weight" in line
            for line in lines
        )
        # Whoever compresses it again, much later, would add what was left in it.
        assert session_of(resumed).state["residual"].keys() == {"middle.weight", "Embed2.weight"}
        step(other)
        again = resumed.state_dict()["parameters"]
        assert again["embed.weight"]["q"] is None and again["embed.weight"]["residual"] is None
        assert again["middle.weight"]["q"] is not None and resumed.stats()["compressed_steps"] == 1
        back = wrap(Net())
        hook = attach(back)
        hook.load_state_dict(resumed.state_dict())
        step(back)
        assert hook.state_dict()["parameters"]["embed.weight"]["q"] is not None


def test_the_list_is_the_configurations_own():
    patterns = ["*embed*"]
    config = PowerSGD(exclude=patterns)
    patterns.append("*")
    assert config.exclude == ["*embed*"]
    assert hash(config) == hash(PowerSGD(exclude=["*embed*"]))
    with pytest.raises(
        commhooks.HookConfigError, match="exclude.*whole buckets are compressed here; use PowerSGD"
    ):
        commhooks.BatchedPowerSGD(exclude=patterns)
