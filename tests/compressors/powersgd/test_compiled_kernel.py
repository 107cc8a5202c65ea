"""A native kernel and the machine: it is compiled once and kept, and an error says why there is none."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import commhooks
from commhooks.compressors.native import library
from tests.support.compilers import needs_compiler
from tests.support.kernels import computing_with
from tests.support.training import Run, make_model


def _fresh_load(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Any:
    """Loads a kernel that is compiled in a moment."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.c")
        source.write_text("int four(void) { return 4; }\n")
        return library.load(source, (), torch.float32)


@needs_compiler
def test_the_kernel_is_compiled_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _fresh_load(monkeypatch, XDG_CACHE_HOME=str(tmp_path))
    (library,) = (tmp_path / "commhooks").iterdir()
    made = library.stat().st_mtime_ns
    _fresh_load(monkeypatch, XDG_CACHE_HOME=str(tmp_path))
    assert [each.stat().st_mtime_ns for each in (tmp_path / "commhooks").iterdir()] == [made]


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
    assert kernel.four() == 4


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
    assert kernel.four() == 4


def test_a_compiler_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "slow-cc"
    compiler.write_text("#!/bin/sh\nexec sleep 20\n")
    compiler.chmod(0o700)
    monkeypatch.setattr(library, "COMPILE_LIMIT_S", 0.2)
    with pytest.raises(commhooks.HookConfigError, match="timed out after 0.2 seconds"):
        _fresh_load(monkeypatch, XDG_CACHE_HOME=str(tmp_path), CC=str(compiler))


def _float64(kernel: str) -> tuple[str, int, torch.Tensor]:
    with computing_with(kernel):
        options = {"start_powerSGD_iter": 1, "matrix_approximation_rank": 2}
        run = Run.new(make_model(torch.float64), hook_options=options).train(4)
    stats = run.hook.stats()
    return stats["kernel"], stats["compressed_steps"], run.weights()


@needs_compiler
def test_float64_parameters(run_ranks: Any) -> None:
    for (kernel, steps, weights), (other, _, expected) in zip(
        run_ranks(_float64, "native"), run_ranks(_float64, "torch"), strict=True
    ):
        assert (kernel, other, steps) == ("native", "torch", 3)
        assert weights.dtype == torch.float64 and (weights - expected).norm() <= 1e-12 * expected.norm()
