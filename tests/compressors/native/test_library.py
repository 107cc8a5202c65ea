"""The native library is compiled once and kept, and an error says why there is none."""

import itertools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import commhooks
from commhooks.compressors.native import library
from commhooks.compressors.native.tables import FactorTable, MatrixTable, PieceTable, Table, address
from tests.support.compilers import needs_compiler


@pytest.fixture
def fresh_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """Loads the library as a process that has not done so yet, with functions that do nothing:
    quickly compiled.
    """
    folder = tmp_path_factory.mktemp("sources")
    macros = "#define JOIN(name, real) commhooks_##name##_##real\n"
    macros += "#define FUNCTION(name, real) int JOIN(name, real)(void) { return 0; }\n"
    (folder / "all.c").write_text(
        macros + "".join(f"FUNCTION({function}, REAL)\n" for function in library._FUNCTIONS)
    )
    monkeypatch.setattr(library, "FOLDER", folder)
    monkeypatch.setattr(library, "SOURCES", {"all.c": ()})

    def load(**environment: str) -> Any:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return library.load.__wrapped__()

    return load


def _works(loaded: Any) -> bool:
    return loaded.commhooks_split_float(None, 1, 0, None) == 0


@needs_compiler
def test_it_is_compiled_once_and_kept(fresh_load: Any, tmp_path: Path) -> None:
    assert _works(fresh_load(XDG_CACHE_HOME=str(tmp_path)))
    (kept,) = (tmp_path / "commhooks").iterdir()
    made = kept.stat().st_mtime_ns
    assert _works(fresh_load(XDG_CACHE_HOME=str(tmp_path)))
    assert [file.stat().st_mtime_ns for file in (tmp_path / "commhooks").iterdir()] == [made]
    # dlopen does not look again at a path that it has loaded
    damaged = tmp_path / "damaged" / "commhooks" / kept.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"of another machine")
    assert _works(fresh_load(XDG_CACHE_HOME=str(tmp_path / "damaged")))
    assert (
        damaged.stat().st_size == kept.stat().st_size and len(list(damaged.parent.iterdir())) == 1
    )


def test_without_a_compiler_the_reason_is_given(
    fresh_load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(
        commhooks.HookConfigError,
        match="/bin/false .* failed; repair the compiler, or name another one",
    ):
        fresh_load(XDG_CACHE_HOME=str(tmp_path), CC="/bin/false")
    with pytest.raises(
        commhooks.HookConfigError, match="/bin/true .* failed; .* Its output: nothing"
    ):
        fresh_load(CC="/bin/true")
    monkeypatch.delenv("CC")
    with pytest.raises(commhooks.HookConfigError, match="no C compiler was found: install one"):
        fresh_load(PATH=str(tmp_path))


def _refuses(folder: Path) -> Any:
    """dlopen as it is where programs in `folder` may not run."""
    real = library.ctypes.CDLL

    def load(path: str) -> Any:
        if Path(path).is_relative_to(folder):
            raise OSError(f"{path}: failed to map segment from shared object")
        return real(path)

    return load


@needs_compiler
def test_a_cache_folder_where_nothing_may_run_is_gone_around(
    fresh_load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("commhooks.compressors.native.library.ctypes.CDLL", _refuses(tmp_path))
    assert _works(fresh_load(XDG_CACHE_HOME=str(tmp_path)))


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_explained(
    fresh_load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("commhooks.compressors.native.library.ctypes.CDLL", _refuses(Path("/")))
    text = (
        "cannot be saved or loaded; set XDG_CACHE_HOME to a folder .*: failed to map segment from"
        " shared object"
    )
    with pytest.raises(commhooks.HookConfigError, match=text):
        fresh_load(XDG_CACHE_HOME=str(tmp_path))


@pytest.mark.parametrize(
    ("mode", "private"), [(0o700, True), (0o775, False), (0o702, False), (0o775, None)]
)
def test_others_cannot_put_code_into_the_cache(
    mode: int, private: bool | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """None: on a system without user ids, where home folders are private."""
    folder = tmp_path / "commhooks"
    folder.mkdir()
    folder.chmod(mode)
    if private is None:
        monkeypatch.delattr(os, "getuid")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with library._cache_folder() as used:
        assert (used == folder) == (private is not False) and used.is_dir()
    assert used.is_dir() == (private is not False)


@needs_compiler
def test_nothing_is_left_where_there_is_no_cache_folder(
    fresh_load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    loaded = fresh_load(XDG_CACHE_HOME=str(blocked))
    assert list(tmp_path.iterdir()) == [blocked]
    assert _works(loaded)


def test_a_compiler_that_hangs_is_ended(
    fresh_load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "slow-cc"
    compiler.write_text("#!/bin/sh\nexec sleep 20\n")
    compiler.chmod(0o700)
    monkeypatch.setattr(library, "COMPILE_LIMIT_S", 0.2)
    with pytest.raises(commhooks.HookConfigError, match="timed out after 0.2 seconds"):
        fresh_load(XDG_CACHE_HOME=str(tmp_path), CC=str(compiler))


# ---- the sources ---------------------------------------------------------------------------------

# psabi: vectors in arguments, but of inlined functions only
WARNINGS = (
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-psabi",
)
# gcc's optimiser warns of more than its parser; shorter vectors are other types in the same lines.
FORMS = {"gcc": "-O1", "clang": "-fsyntax-only"}
SHORTER = {"float": "-mno-avx512f", "double": "-mno-avx"}


@pytest.mark.parametrize("compiler", FORMS)
def test_the_sources_compile_without_a_warning(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    for (source, flags), real in itertools.product(
        library.SOURCES.items(), library.C_TYPES.values()
    ):
        forms = [(FORMS[compiler],)] if real == "float" else []
        forms += [(SHORTER[real], "-fsyntax-only")] if platform.machine() == "x86_64" else []
        for form in forms:
            command = [compiler, *library.FLAGS, *flags, *WARNINGS, *form, f"-DREAL={real}", "-c"]
            command += [str(library.FOLDER / source), "-o", str(tmp_path / "object.o")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=280)
            assert done.returncode == 0, (command, done.stderr)


def test_stray_files_are_no_part_of_the_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files that editors and systems leave there neither fail nor make another build."""
    assert set(library.SOURCES) == {
        path.name for path in Path(commhooks.__file__).parent.rglob("*.c")
    }
    wanted = library.source_text()
    monkeypatch.setattr(
        library, "FOLDER", Path(shutil.copytree(library.FOLDER, tmp_path / "native"))
    )
    assert library.source_text() == wanted
    (library.FOLDER / "a folder.h").mkdir()
    (library.FOLDER / "powersgd.c~").write_bytes(b"\xff")
    (library.FOLDER / ".DS_Store").symlink_to("nowhere")
    assert library.source_text() == wanted


@pytest.mark.parametrize(
    ("table", "struct"), [(MatrixTable, "matrix"), (FactorTable, "factor"), (PieceTable, "piece")]
)
def test_a_table_has_the_fields_of_its_struct(table: type[Table], struct: str) -> None:
    text = (
        (library.FOLDER / "tables.h")
        .read_text()
        .partition(f"struct {struct} {{")[2]
        .partition("}")[0]
    )
    declared = re.sub(r"/\*.*?\*/", "", text).replace("const ", "").split(";")[:-1]
    names = [
        name.strip(" *\n")
        for line in declared
        for name in line.strip().partition(" ")[2].split(",")
    ]
    assert tuple(names) == table.fields


@pytest.mark.parametrize(
    ("tensor", "numel"),
    [
        (torch.zeros(6, dtype=torch.float64), 6),
        (torch.zeros(6, dtype=torch.float16), 3),
        (torch.zeros(5), 6),
        (torch.zeros(2, 6)[:, :3], 6),
        (torch.zeros(6, device="meta"), 6),
    ],
    ids=["wider", "narrower", "short", "with gaps", "elsewhere"],
)
def test_c_gets_no_address_of_anything_else(tensor: torch.Tensor, numel: int) -> None:
    with pytest.raises(
        commhooks.HookRunError,
        match=rf"needs {numel} contiguous numbers of torch.float32 .* and got a Tensor of",
    ):
        address(tensor, torch.float32, numel)
    good = torch.zeros(2, 3)
    assert address(good, torch.float32, 6) == good.data_ptr()
