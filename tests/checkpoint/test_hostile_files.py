"""A damaged or hostile file, of a checkpoint or of settings, is named, and no code in it is run."""

import contextlib
import copy
import io
import os
import pickle
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from test_hostile_payloads import power_sgd, silent

from accelerate_commhooks import CommHookKwargs
from accelerate_commhooks.saving import ensure_hook_saver
from commhooks import CommHookError, HookConfigError, HookRunError, PayloadError
from commhooks.checkpoint.parts import save_id
from commhooks.hook.dcp_folder import DCPFolder
from lightning_commhooks import CommHookDDP
from tests.checkpoint import hostile
from tests.support import features, sharded
from tests.support.accelerators import Training, Warnings, launched
from tests.support.ddp_steps import limit_from_now_on, process_group_of_one
from tests.support.features import fully_shard_on_gloo
from tests.support.lightning_support import Model, data, trainer
from tests.support.models import same
from tests.support.training import Run

# ---- code in files


class MakesFolder:
    """Makes a folder when it is unpickled, which shows that code of a file has run."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def write_malicious(path: Path, how: str, trap: Path) -> None:
    if how == "pickle":
        path.write_bytes(pickle.dumps(MakesFolder(trap)))
    else:
        torch.save(
            {"format": "commhooks", "state_dict": MakesFolder(trap)},
            path,
            _use_new_zipfile_serialization=how == "zip",
        )


HOW = ["pickle", "zip", "old format"]


@pytest.mark.parametrize("how", HOW)
def test_the_trap_works(tmp_path: Path, how: str) -> None:
    path = tmp_path / "file.pt"
    trap = tmp_path / "trap"
    write_malicious(path, how, trap)
    if how == "pickle":
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert trap.is_dir()


@launched
def _accelerate_save(folder: str) -> None:
    Training().train(5).save(folder)


@launched
def _accelerate_load(folder: str) -> list[str]:
    """Load each folder in `folder`, and return the warnings or the error of each."""
    run = Training().train(4)
    outcomes = []
    for name in sorted(os.listdir(folder)):
        before = run.hook.state_dict()
        with Warnings() as warned:
            try:
                ensure_hook_saver(run.accelerator).load(f"{folder}/{name}")
                outcomes.append("".join(warned))
            except PayloadError as error:
                outcomes.append(str(error))
                assert same(run.hook.state_dict(), before)
    return outcomes


def test_accelerate_runs_nothing_of_a_file(run_ranks: Any, tmp_path: Path) -> None:
    folders = tmp_path / "all"
    trap = tmp_path / "trap"
    run_ranks(_accelerate_save, str(tmp_path / "good"), world_size=2)
    malicious = []
    for how in HOW:
        for bad in ("comm_hook.pt", "comm_hook_rank1.pt"):
            folder = folders / f"{how} {bad}"
            folder.mkdir(parents=True)
            for file in (tmp_path / "good").glob("comm_hook*.pt"):
                (folder / file.name).write_bytes(file.read_bytes())
            write_malicious(folder / bad, how, trap)
            malicious.append(folder / bad)
    ranks = run_ranks(_accelerate_load, str(folders), world_size=2)
    for index, path in enumerate(sorted(malicious, key=lambda path: path.parent.name)):
        readers = ranks if path.name == "comm_hook.pt" else ranks[1:]
        for outcomes in readers:
            assert str(path) in outcomes[index] and "cannot be read" in outcomes[index]
    assert not trap.exists()


def _lightning_fit(path: str, root: str) -> str:
    with pytest.raises(PayloadError) as error:
        trainer(root, max_epochs=1).fit(Model(), data(), ckpt_path=path)
    return str(error.value)


@pytest.mark.parametrize("how", HOW)
def test_lightning_runs_nothing_of_a_file(run_ranks: Any, tmp_path: Path, how: str) -> None:
    path = tmp_path / "file.ckpt"
    trap = tmp_path / "trap"
    write_malicious(path, how, trap)
    (text,) = run_ranks(_lightning_fit, str(path), str(tmp_path), world_size=1)
    assert str(path) in text and "cannot be read" in text
    assert not trap.exists()


def test_lightning_reads_a_checkpoint_at_a_url_with_weights_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def load(self: Any, path: Any, **options: Any) -> dict[str, Any]:
        asked.append(options["weights_only"])
        return {}

    monkeypatch.setattr(TorchCheckpointIO, "load_checkpoint", load)
    strategy = CommHookDDP("powerSGD")
    for weights_only in (None, True, False):
        strategy.load_checkpoint("http://localhost/file.ckpt", weights_only=weights_only)
    assert asked == [True, True, False]
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError, match="nothing.ckpt"):
        strategy.load_checkpoint("nothing.ckpt")


# ---- random damage


@launched
def _damaged_files(folder: str, count: int) -> list[int]:
    """Load `count` damaged files, and return how many were refused and how many loaded.

    The ranks must agree on each, and the run must go on after it.
    """
    run = Training().train(5).save(folder)
    rng = random.Random(4)
    outcomes = [0, 0]
    paths = sorted(Path(folder).glob("comm_hook*.pt"))
    good = {path: path.read_bytes() for path in paths}
    saver = ensure_hook_saver(run.accelerator)
    with silent():
        for _ in range(count):
            path = rng.choice(paths)
            content, what = _damaged(good[path], rng, is_shared=path == paths[0])
            what = f"{path.name}: {what}"
            saver.load(folder)
            before = run.hook.state_dict()
            _write_on_rank_0(path, content)
            refused = False
            try:
                saver.load(folder)
            except PayloadError as error:
                refused = True
                assert str(paths[0]) in str(error), what
                assert same(run.hook.state_dict(), before), f"half-loaded: {what}"
            except BaseException as error:
                raise AssertionError(what) from error
            refusals = torch.tensor([int(refused)])
            dist.all_reduce(refusals)
            assert refusals.item() in (0, 2), f"one rank refuses, the other does not: {what}"
            outcomes[0 if refused else 1] += 1
            if not refused:
                run.train(1)
                assert all(bool(p.grad.isfinite().all()) for p in run.model.parameters()), what
            _write_on_rank_0(path, good[path])
    return outcomes


def _damaged(good: bytes, rng: random.Random, *, is_shared: bool) -> tuple[bytes, str]:
    if rng.random() < 0.5:
        return hostile.damaged_bytes(good, rng)
    saved = torch.load(io.BytesIO(good), weights_only=True)
    changed, what = hostile.changed(saved, saved, rng)
    if rng.random() < 0.5 and is_shared and isinstance(changed, dict):
        # Malice can compute the fingerprint, damage cannot.
        with contextlib.suppress(Exception):
            changed["fingerprint"] = save_id(changed)
    return hostile.as_file(changed), what


def _write_on_rank_0(path: Path, content: bytes) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        path.write_bytes(content)
    dist.barrier()


def test_both_ranks_load_or_refuse_a_damaged_file_of_accelerate(
    run_ranks: Any, tmp_path: Path
) -> None:
    count = 40 * hostile.TIMES
    first, second = run_ranks(_damaged_files, str(tmp_path), count, timeout_s=100 + count)
    print(f"files of Accelerate: {count} damaged, {first[1]} loaded, the others refused")
    assert first == second and min(first) > 4


@fully_shard_on_gloo
@pytest.mark.parametrize("name", ["int8", "diloco"])
def test_a_damaged_folder_of_dcp_loads_or_is_refused(tmp_path: Path, name: str) -> None:
    """CommHookFSDP2 and the plugins for Accelerate and transformers read such folders."""
    with process_group_of_one(), silent():
        model, hook = sharded.attached(1, 1, name)

        def train(step: int) -> None:
            model.zero_grad()
            model(sharded.random_gradients(step)).backward()
            hook.synchronize()
            assert all(
                bool(parameter.grad.to_local().isfinite().all()) for parameter in model.parameters()
            )

        train(0)
        folder = DCPFolder(tmp_path / "hook", "of the test", lambda loaded: loaded)
        rng = random.Random(7)
        count = loaded = 0
        folder.save(hook)
        good = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
        for _ in range(25 * hostile.TIMES // 2):
            folder.prepare_load(hook, strict=True)()
            before = hook.state_dict()
            path = rng.choice(list(good))
            content, what = hostile.damaged_bytes(good[path], rng)
            path.write_bytes(content)
            try:
                folder.prepare_load(hook, strict=rng.random() < 0.5)()
                loaded += 1
                train(1)
            except PayloadError as error:
                after = hook.state_dict()
                assert same(_whole(after), _whole(before)), f"half-loaded: {path.name} {what}"
                assert str(tmp_path) in str(error) or "damaged" in str(error), what
            except BaseException as error:
                raise AssertionError(f"number {count}: {path.name} {what}") from error
            path.write_bytes(good[path])
            count += 1
        print(f"folders, {name}: {count} damaged, {loaded} loaded, the others refused")
        assert 0.05 * count < loaded < 0.8 * count


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    """Return `state` with plain tensors, and with the content of its bytes in their place."""
    rest = torch.load(io.BytesIO(state["commhooks"]), weights_only=True)
    rest["shards"] = [torch.load(io.BytesIO(shard), weights_only=True) for shard in rest["shards"]]
    whole = {"rest": rest}
    for key in state.keys() - {"commhooks"}:
        whole[key] = {name: tensor.to_local() for name, tensor in state[key].items()}
    return whole


def test_lightning_loads_no_optimizer_before_the_payload_is_checked() -> None:
    with process_group_of_one():
        subject = power_sgd()
        optimizer = torch.optim.SGD(subject.ddp.parameters(), lr=0.5)
        strategy = CommHookDDP("powerSGD")
        strategy._comm_hook = subject.hook
        strategy.optimizers = [optimizer]
        states = torch.optim.SGD(subject.ddp.parameters(), lr=0.1).state_dict()
        checkpoint = {"optimizer_states": [states], "commhooks": subject.good[0] | {"step": -1}}
        with pytest.raises(PayloadError, match="'step' is -1"):
            strategy.load_optimizer_state_dict(checkpoint)
        assert optimizer.param_groups[0]["lr"] == 0.5


# ---- one rank only


def _one_rank_refuses(goes_on: bool) -> tuple[str, float]:
    """Return the error in which the run of this rank ends, and after how many seconds.

    Rank 0 could not load; it trains on all the same if `goes_on`.
    """
    group = dist.new_group()
    run = Run.new(ddp={"process_group": group}, hook_options={"start_powerSGD_iter": 1}).train(3)
    saved = run.hook.state_dict()
    if dist.get_rank() == 0:
        saved["parameters"]["5.weight"]["q"].fill_(float("nan"))
    fresh = Run.new(ddp={"process_group": group}, hook_options={"start_powerSGD_iter": 1})
    refused = ""
    try:
        fresh.hook.load_state_dict(saved)
    except CommHookError as error:
        refused = str(error)
    assert bool(refused) == (dist.get_rank() == 0)
    limit_from_now_on(group, 2.0)
    begin = time.monotonic()
    if refused and not goes_on:
        return refused, 0.0
    with pytest.raises(HookRunError) as caught:
        fresh.train(1)
    return str(caught.value), time.monotonic() - begin


@features.limit_of_a_group
def test_no_rank_waits_forever_for_a_rank_that_could_not_load(run_ranks: Any) -> None:
    (refused, _), (lost, seconds) = run_ranks(_one_rank_refuses, False)
    assert "holds inf or NaN" in refused
    assert "load on every rank, or on none" in lost
    assert seconds < 20
    for text, _ in run_ranks(_one_rank_refuses, True):
        assert "the ranks are at different steps of the hook: rank 0: 0, rank 1: 3" in text


# ---- settings


HOOKS: list[dict[str, Any]] = [
    {
        "hook": "powerSGD",
        "wrapper": "bf16",
        "hook_options": {"matrix_approximation_rank": 2, "exclude": ["*embed*"]},
    },
    {"hook": "powerSGD", "hook_options": {"matrix_approximation_rank": 4}, "bucket_cap_mb": 12.5},
    {
        "hook": "int8",
        "hook_options": {"block_size": 64, "start_iter": 0.1},
        "ranks_per_node": "auto",
    },
    {"hook": "int4", "ranks_per_node": 2, "save_residual": "mean"},
    {"hook": "auto", "hook_options": {"quality": "close", "measure_steps": 9}, "strict": False},
    {
        "hook": "diloco",
        "hook_options": {"sync_every": 20, "wire": "int8", "fragments": 2, "delay": 3},
    },
    {"hook": "local_sgd", "hook_options": {"sync_every": 4}, "total_steps": 1000},
]
TEXTS = [
    *(
        "2001-99-99",
        "0x",
        "1e400",
        "-.inf",
        "!!int abc",
        "!!float x",
        "!!binary '*'",
        "!!timestamp x",
        "1" * 5000,
    ),
    *(
        "[" * 2000,
        "{a: " * 200,
        "&a [*a]",
        "*nothing",
        "<<: 3",
        "{[a]: b}",
        "? ",
        "\x00",
        "\ud800",
        "${hook}",
        "${",
    ),
    *(
        "${oc.env:NO_SUCH_VARIABLE}",
        "${oc.decode:'['}",
        "???",
        "'",
        '"\\x',
        "%TAG",
        "--- 1\n--- 2",
        "!!set {a}",
    ),
    "&a [&b [x, x], &c [*b, *b], &d [*c, *c], &e [*d, *d], &f [*e, *e], *f, *f]",
]


def _file_of(rng: random.Random, trap: Path) -> tuple[bytes, str]:
    """Return the content of a damaged or hostile file of settings, and what was done to it."""
    section = copy.deepcopy(rng.choice(HOOKS))
    document = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_CPU",
        "comm_hook_config": section,
    }
    good: Any = rng.choice([document, section])
    kind = rng.random()
    if kind < 0.3:
        return hostile.damaged_bytes(yaml.safe_dump(good).encode(), rng)
    if kind < 0.6:
        malice = [
            f"!!python/object/apply:os.mkdir ['{trap}']",
            f"!!python/object/new:os.mkdir ['{trap}']",
        ]
        text = rng.choice([*TEXTS, *malice])
        path = rng.choice(hostile.places(good))
        hostile.put(good, path, "HERE")
        return (
            yaml.safe_dump(good).replace("HERE", text).encode("utf-8", "surrogatepass"),
            f"{path}: {text[:50]}",
        )
    changed, what = hostile.changed(good, rng.choice(HOOKS), rng)
    try:
        return yaml.dump(changed).encode("utf-8", "surrogatepass"), what
    except (RecursionError, ValueError, TypeError, NotImplementedError):
        return b"", what  # not everything can be written


@pytest.mark.parametrize("value", ["!!int abc", "!!timestamp x", "1" * 5000, "[" * 2000])
def test_an_error_of_the_yaml_reader_names_the_file(tmp_path: Path, value: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"hook: int8\nhook_options:\n  block_size: {value}\n")
    with pytest.raises(HookConfigError, match="settings.yaml is not YAML: "):
        CommHookKwargs.from_config(file)


def test_a_changed_file_of_settings_is_read_or_refused_by_name(tmp_path: Path) -> None:
    rng = random.Random(5)
    file = tmp_path / "settings.yaml"
    trap = tmp_path / "trap"
    count = 30 * hostile.TIMES
    accepted = 0
    for number in range(count):
        content, what = _file_of(rng, trap)
        file.write_bytes(content)
        started = time.monotonic()
        try:
            CommHookKwargs.from_config(file)
            accepted += 1
        except CommHookError as error:
            assert str(file) in str(error), (number, what, error)
        except BaseException as error:
            raise AssertionError(f"number {number}: {what}: {content[:300]!r}") from error
        assert time.monotonic() - started < 10, (number, what)
    assert not trap.exists()
    print(f"settings: {count} files, {accepted} accepted, the others refused")
    assert 0.05 * count < accepted < 0.8 * count
