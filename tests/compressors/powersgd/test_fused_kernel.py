"""`fused=True` and the machine: the kernel is compiled once and kept, and a rank that cannot have it says so to all."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commhooks
from commhooks.compressors.native import library
from commhooks.compressors.powersgd import native_products
from commhooks.ddp_comm_hooks import powerSGD_hook
from tests.support.compilers import needs_compiler
from tests.support.training import SEVERAL_BUCKETS_MB, Run, make_model


def _fresh_load(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Any:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return native_products.load.__wrapped__()


@needs_compiler
def test_the_kernel_is_compiled_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _fresh_load(monkeypatch, XDG_CACHE_HOME=str(tmp_path))
    (library,) = (tmp_path / "commhooks").iterdir()
    made = library.stat().st_mtime_ns
    _fresh_load(monkeypatch, XDG_CACHE_HOME=str(tmp_path))
    assert [each.stat().st_mtime_ns for each in (tmp_path / "commhooks").iterdir()] == [made]
    blocked = tmp_path / "a file"
    blocked.write_text("")
    _fresh_load(monkeypatch, XDG_CACHE_HOME=str(blocked))  # in a temporary folder then


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        commhooks.HookConfigError, match="/bin/false .* failed; repair the compiler, or name another one"
    ):
        _fresh_load(monkeypatch, XDG_CACHE_HOME=str(tmp_path), CC="/bin/false")
    with pytest.raises(commhooks.HookConfigError, match="/bin/true .* failed; .* It said: nothing"):
        _fresh_load(monkeypatch, CC="/bin/true")
    monkeypatch.delenv("CC")
    with pytest.raises(commhooks.HookConfigError, match="no C compiler was found: install one"):
        _fresh_load(monkeypatch, PATH=str(tmp_path))


@needs_compiler
def test_a_kept_file_that_is_damaged_is_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _fresh_load(monkeypatch, XDG_CACHE_HOME=str(tmp_path / "good"))
    (good,) = (tmp_path / "good" / "commhooks").iterdir()
    damaged = tmp_path / "damaged" / "commhooks" / good.name  # dlopen does not look again at a path that it has loaded
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"of another machine")
    _fresh_load(monkeypatch, XDG_CACHE_HOME=str(tmp_path / "damaged"))
    assert damaged.stat().st_size == good.stat().st_size and len(list(damaged.parent.iterdir())) == 1


def _refuses(folder: Path) -> Any:
    """dlopen as it is where programs in `folder` may not run."""
    real = library.ctypes.CDLL

    def load(path: str) -> Any:
        if Path(path).is_relative_to(folder):
            raise OSError(f"{path}: failed to map segment from shared object")
        return real(path)

    return load


@needs_compiler
def test_a_cache_folder_where_nothing_may_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("commhooks.compressors.native.library.ctypes.CDLL", _refuses(tmp_path))
    kernel = _fresh_load(monkeypatch, XDG_CACHE_HOME=str(tmp_path))
    products = native_products.NativeProducts(kernel, [(3, 4, 1)], torch.float32)
    products.q[0].fill_(1)
    products.form("P", [0], [torch.ones(3, 4)], None, 1.0)
    assert products.p[0].tolist() == [[4.0, 4.0, 4.0]]


@needs_compiler
def test_what_cannot_be_loaded_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("commhooks.compressors.native.library.ctypes.CDLL", _refuses(Path("/")))
    text = "cannot be kept or loaded; name a folder in .* XDG_CACHE_HOME .*: failed to map segment from shared object"
    with pytest.raises(commhooks.HookConfigError, match=text):
        _fresh_load(monkeypatch, XDG_CACHE_HOME=str(tmp_path))


@pytest.mark.parametrize(("mode", "private"), [(0o700, True), (0o775, False), (0o702, False)])
def test_others_cannot_put_code_into_the_cache(
    mode: int, private: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "commhooks"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library._cache_folder() == (folder if private else None)


def test_where_there_are_no_user_ids(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "getuid")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library._cache_folder() == tmp_path / "commhooks"


@needs_compiler
def test_nothing_is_left_where_there_is_no_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kernel = _fresh_load(monkeypatch, XDG_CACHE_HOME=str(blocked))
    assert list(tmp_path.iterdir()) == [blocked]
    products = native_products.NativeProducts(kernel, [(2, 2, 1)], torch.float32)
    products.unit_rows([torch.tensor([[3.0, 4.0]])], lambda i: torch.ones(1, 2))
    assert products.q[0].tolist() == [pytest.approx([0.6, 0.8])]


def test_a_compiler_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "slow-cc"
    compiler.write_text("#!/bin/sh\nexec sleep 20\n")
    compiler.chmod(0o700)
    monkeypatch.setattr(library, "COMPILE_LIMIT_S", 0.2)
    with pytest.raises(commhooks.HookConfigError, match="timed out after 0.2 seconds"):
        _fresh_load(monkeypatch, XDG_CACHE_HOME=str(tmp_path), CC=str(compiler))


def _attach(cache: Path, without_compiler: list[int], ready_made_state: bool = False) -> tuple[str, str]:
    """The error's type and text where compilers are missing on some ranks."""
    rank = dist.get_rank()
    environment = {"XDG_CACHE_HOME": str(cache / f"of rank {rank}")}
    if rank in without_compiler:
        environment["CC"] = "/bin/false"
    native_products.load.cache_clear()
    try:
        with mock.patch.dict(os.environ, environment):
            ddp = DistributedDataParallel(make_model(), bucket_cap_mb=SEVERAL_BUCKETS_MB)
            options: dict[str, Any] = {"fused": True, "start_powerSGD_iter": 2}
            try:
                if ready_made_state:
                    state = powerSGD_hook.PowerSGDState(None, **options)
                    hook = commhooks.attach(ddp, powerSGD_hook.powerSGD_hook, hook_state=state)
                else:
                    hook = commhooks.attach(ddp, "powerSGD", hook_options=options)
            except commhooks.CommHookError as error:
                return type(error).__name__, str(error)
            for _ in range(3):
                ddp(torch.ones(4, 1, 8, 8)).sum().backward()
            return "compressed steps", str(hook.stats()["compressed_steps"])
    finally:
        native_products.load.cache_clear()


def _attach_all(cache: Path) -> list[tuple[str, str]]:
    return [_attach(cache, [1]), _attach(cache, [1], True), _attach(cache, [0, 1]), _attach(cache, [])]


@needs_compiler
def test_one_rank_without_a_compiler(run_ranks: Any, tmp_path: Path) -> None:
    for one, one_by_state, both, none in run_ranks(_attach_all, tmp_path):
        for kind, text in (one, one_by_state):
            assert kind == "AttachError"
            assert text.startswith(
                "of 2 ranks these cannot do what all of them ask for: [1]. Why: fused=True: the native kernel cannot "
                "be compiled: /bin/false "
            )
            assert "or name another one in the environment variable CC" in text
            assert text.endswith("Without fused=True, torch would compute instead")
        assert both[0] == "HookConfigError" and both[1].startswith("fused=True: the native kernel cannot be compiled")
        assert none == ("compressed steps", "1")


def _float64(fused: bool | None) -> tuple[str, int, torch.Tensor]:
    options = {"fused": fused, "start_powerSGD_iter": 1, "matrix_approximation_rank": 2}
    run = Run.new(make_model(torch.float64), hook_options=options).train(4)
    stats = run.hook.stats()
    return stats["kernel"], stats["compressed_steps"], run.weights()


@needs_compiler
@pytest.mark.parametrize("fused", [True, None])
def test_float64_parameters(run_ranks: Any, fused: bool | None) -> None:
    for (kernel, steps, weights), (other, _, expected) in zip(
        run_ranks(_float64, fused), run_ranks(_float64, False), strict=True
    ):
        assert (kernel, other, steps) == ("native", "torch", 3)
        assert weights.dtype == torch.float64 and (weights - expected).norm() <= 1e-12 * expected.norm()
