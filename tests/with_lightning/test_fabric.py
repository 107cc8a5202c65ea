"""Fabric's checkpoints save and restore a hook for every model."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from commhooks import HookConfigError, LocalSGD, PayloadError, PowerSGD, allreduce_hook
from lightning_commhooks.fabric import CommHookDDP
from tests.support.lightning_support import (
    SEVERAL_BUCKETS_MB,
    PoolEnvironment,
    assert_equal,
    caught_warnings,
)
from tests.support.workers import RanksFailed

HOOK = PowerSGD(start_powerSGD_iter=2, matrix_approximation_rank=2)


def _fabric(hook: Any = HOOK, **options: Any) -> Fabric:
    options.setdefault("bucket_cap_mb", SEVERAL_BUCKETS_MB)
    plugins = [PoolEnvironment(), *options.pop("plugins", [])]
    strategy = CommHookDDP(hook, **options)
    fabric = Fabric(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, plugins=plugins
    )
    fabric.launch()
    return fabric


def _net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))


def _setup(fabric: Fabric, seed: int = 0) -> tuple[Any, Any]:
    model = _net(seed)
    return fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Another one on each rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 16, generator=generator), torch.randn(8, 8, generator=generator)


def _train(fabric: Fabric, model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        x, y = _batch(step)
        fabric.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}


# ---- save and load -------------------------------------------------------------------------------


def _without_state(root: str) -> dict[str, Any]:
    """A load of a checkpoint without the state of the hook."""
    path = f"{root}/state.ckpt"
    fabric = _fabric()
    model, optimizer = _setup(fabric)
    _train(fabric, model, optimizer, range(5))
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 5})
    hook = fabric.strategy.comm_hook
    assert hook is not None and hook is fabric.strategy.hook_of(model) is fabric.strategy.hook_of(
        model.module
    )
    content = torch.load(path, weights_only=True)
    keys = set(content.pop("commhooks"))
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(content, path)
    dist.barrier()
    with caught_warnings() as texts:
        fabric.load(path, {"model": model, "optimizer": optimizer})
    return {"keys": keys, "warnings": [text for text in texts if "no state of a" in text]}


def test_a_checkpoint_without_the_state_is_warned_of(run_ranks: Any, tmp_path: Path) -> None:
    """That a resume with it is exact: tests/checkpoint/test_resume.py."""
    for number, rank in enumerate(run_ranks(_without_state, str(tmp_path))):
        assert rank["keys"] == {"model"} and len(rank["warnings"]) == (number == 0)


def _two_models(root: str) -> dict[str, Any]:
    path = f"{root}/state.ckpt"
    fabric = _fabric()
    first, second = _setup(fabric), _setup(fabric, seed=3)
    _train(fabric, *first, range(4))
    _train(fabric, *second, range(10, 16))
    state = {"first": first[0], "second": second[0], "a": first[1], "b": second[1]}
    fabric.save(path, state | {"step": 5})
    _train(fabric, *first, range(20, 24))
    _train(fabric, *second, range(30, 34))
    whole = _weights(first[0]), _weights(second[0])

    again = _fabric()
    second, first = _setup(again, seed=8), _setup(again, seed=9)  # in another order
    state = {"first": first[0], "second": second[0], "a": first[1], "b": second[1], "step": 0}
    assert again.load(path, state) == {} and state["step"] == 5
    steps = [
        again.strategy.hook_of(model_and_optimizer[0]).stats()["step"]
        for model_and_optimizer in (first, second)
    ]
    _train(again, *first, range(20, 24))
    _train(again, *second, range(30, 34))
    last = again.strategy.comm_hook is again.strategy.hook_of(first[0])
    return {
        "whole": whole,
        "resumed": (_weights(first[0]), _weights(second[0])),
        "steps": steps,
        "last": last,
    }


def test_each_model_has_a_hook_that_is_saved_under_its_name(run_ranks: Any, tmp_path: Path) -> None:
    for rank in run_ranks(_two_models, str(tmp_path)):
        assert rank["steps"] == [4, 6] and rank["last"]
        for resumed, whole in zip(rank["resumed"], rank["whole"], strict=True):
            assert_equal(resumed, whole)


def _damaged(root: str) -> dict[str, Any]:
    path = f"{root}/state.ckpt"
    fabric = _fabric()
    first, second = _setup(fabric), _setup(fabric, seed=3)
    _train(fabric, *first, range(3))
    _train(fabric, *second, range(3))
    fabric.save(path, {"first": first[0], "second": second[0]})
    content = torch.load(path, weights_only=True)
    content["commhooks"]["second"]["step"] = -1
    path = f"{root}/damaged.ckpt"
    if dist.get_rank() == 0:
        torch.save(content, path)
    dist.barrier()
    again = _fabric()
    first, second = _setup(again), _setup(again)
    with pytest.raises(PayloadError) as error:
        again.load(path, {"first": first[0], "second": second[0]})
    return {"error": str(error.value), "step": again.strategy.hook_of(first[0]).stats()["step"]}


def test_a_damaged_state_of_one_hook_changes_none(run_ranks: Any, tmp_path: Path) -> None:
    for rank in run_ranks(_damaged, str(tmp_path)):
        assert rank["error"].startswith(
            f"{tmp_path}/damaged.ckpt, key 'commhooks': damaged hook state: 'step'"
        )
        assert rank["step"] == 0


def _of_another_hook(root: str) -> dict[str, Any]:
    path = f"{root}/state.ckpt"
    fabric = _fabric()
    model, optimizer = _setup(fabric)
    _train(fabric, model, optimizer, range(3))
    fabric.save(path, {"model": model})
    other = _fabric("int8")
    model, _ = _setup(other)
    with pytest.raises(PayloadError) as error:
        other.load(path, {"model": model})
    other.load(path, {"model": model}, strict=False)
    return {"error": str(error.value), "step": other.strategy.hook_of(model).stats()["step"]}


def test_the_strict_of_a_load_is_the_hooks_too(run_ranks: Any, tmp_path: Path) -> None:
    for rank in run_ranks(_of_another_hook, str(tmp_path)):
        assert (
            "pass strict=False, with hook=... or to the load" in rank["error"] and rank["step"] == 0
        )


def _without_a_word(root: str) -> dict[str, Any]:
    """What would lose the state of a hook without an error."""
    path = f"{root}/state.ckpt"
    fabric = _fabric()
    model, optimizer = _setup(fabric)
    _train(fabric, model, optimizer, range(3))
    results: dict[str, Any] = {}
    with caught_warnings() as texts:
        fabric.save(path, {"model": model.state_dict()})
        fabric.save(path, {"model": model.state_dict()})
    results["state_dict"] = [text for text in texts if "fabric.save" in text]
    fabric.save(path, {"model": model})
    with caught_warnings() as texts:
        results["keys"] = set(fabric.load(path))
    results["no state"] = [text for text in texts if "not restored" in text]
    with caught_warnings() as texts:
        _fabric().load(path, {"model": _net()})
    results["early"] = [text for text in texts if "fabric.setup before fabric.load" in text]
    return results


def test_what_loses_the_state_is_a_warning(run_ranks: Any, tmp_path: Path) -> None:
    ranks = run_ranks(_without_a_word, str(tmp_path))
    for number, rank in enumerate(ranks):
        assert rank["keys"] == {"model", "commhooks"}
        for what in ("state_dict", "no state", "early"):
            assert len(rank[what]) == (number == 0), what
            assert all(text.startswith("commhooks: ") for text in rank[what])


# ---- training ------------------------------------------------------------------------------------


def _scaled() -> Any:
    from lightning.fabric.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    fabric = _fabric(plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    model, optimizer = _setup(fabric)
    _train(fabric, model, optimizer, range(4))
    return fabric.strategy.comm_hook.state_dict()["loss_scale"]


def test_residuals_follow_the_loss_scale(run_ranks: Any) -> None:
    assert run_ranks(_scaled) == [1024.0, 1024.0]


def _off(root: str) -> dict[str, Any]:
    fabric = _fabric(None)
    model, optimizer = _setup(fabric)
    _train(fabric, model, optimizer, range(3))
    fabric.save(f"{root}/state.ckpt", {"model": model})
    return {
        "hook": fabric.strategy.comm_hook,
        "keys": set(torch.load(f"{root}/state.ckpt", weights_only=True)),
    }


def test_without_a_hook_it_is_fabrics_ddp(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(_off, str(tmp_path)) == [{"hook": None, "keys": {"model"}}] * 2


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"hook": "powerSGD", "bucket_cap": 25},
            r"no argument 'bucket_cap' \(did you mean 'bucket_cap_mb'\?\)",
        ),
        ({"hook": "powerSGD", "ddp_comm_hook": print}, "ddp_comm_hook= together with hook="),
    ],
)
def test_wrong_arguments_are_refused_at_construction(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(HookConfigError, match=text):
        CommHookDDP(**arguments)


class _Learned:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _own_hook(state: _Learned, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return allreduce_hook(None, bucket)


def _refused(root: str) -> list[str]:
    fabric = _fabric(_own_hook, hook_state=_Learned())
    model, _ = _setup(fabric)
    path = f"{root}/{dist.get_rank()}.ckpt"
    torch.save({"model": model.module.state_dict(), "commhooks": 3}, path)
    errors = []
    for refused in (
        lambda: _setup(fabric),
        lambda: fabric.save(f"{root}/a.ckpt", {"model": model, "commhooks": {}}),
        lambda: fabric.load(path, {"model": model}),
    ):
        with pytest.raises((HookConfigError, PayloadError)) as error:
            refused()
        errors.append(str(error.value))
    return errors


def test_wrong_states_and_keys_are_refused(run_ranks: Any, tmp_path: Path) -> None:
    for rank, (second, key, content) in enumerate(run_ranks(_refused, str(tmp_path))):
        assert second.startswith(
            "hook_state (_Learned) is one object, and is used by another model already"
        )
        assert key == "'commhooks' in the state: this key holds the states of the hooks"
        of_file = (
            f"{tmp_path}/{rank}.ckpt, key 'commhooks': the checkpoint's 'commhooks' is a int, not a"
            " dict by models"
        )
        assert content == of_file


def test_only_the_configuration_is_pickled() -> None:
    strategy = CommHookDDP(HOOK, start_method="spawn")
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy._request == strategy._request and copy.comm_hook is None
    assert repr(copy) == "lightning_commhooks.fabric.CommHookDDP(hook='powerSGD')"


def _a_fraction(total_steps: int | None) -> Any:
    fabric = _fabric(PowerSGD(start_powerSGD_iter=0.25), total_steps=total_steps)
    model, _ = _setup(fabric)
    return fabric.strategy.hook_of(model).options["start_powerSGD_iter"]


def test_a_fraction_needs_the_length_of_the_run(run_ranks: Any) -> None:
    assert run_ranks(_a_fraction, 100) == [25, 25]
    with pytest.raises(
        RanksFailed,
        match="is a fraction of the run, whose length is unknown here: pass total_steps=",
    ):
        run_ranks(_a_fraction, None)


def _saved_in_mid_round(root: str) -> Any:
    fabric = _fabric(LocalSGD(sync_every=3))
    model, optimizer = _setup(fabric)
    _train(fabric, model, optimizer, range(4))
    local = _weights(model)
    # without the model, and so without its hook
    fabric.save(f"{root}/weights.ckpt", {"weights": model.state_dict()})
    return local, _weights(model)


def test_a_save_ends_the_round(run_ranks: Any, tmp_path: Path) -> None:
    (local, now), (others, same) = run_ranks(_saved_in_mid_round, str(tmp_path))
    saved = torch.load(tmp_path / "weights.ckpt", weights_only=True)["weights"]
    assert_equal(now, same)
    assert_equal(now, saved)
    assert not torch.equal(local["0.weight"], others["0.weight"])
