"""The native kernels compile without a warning: with gcc and clang where these are, for every dtype and length of
vectors."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import commhooks
from commhooks.compressors.native import library
from commhooks.compressors.native.tables import address
from commhooks.compressors.powersgd import native_products
from commhooks.compressors.quantized import native_blocks

SOURCES = {native_products.SOURCE: native_products.FLAGS, native_blocks.SOURCE: native_blocks.FLAGS}
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi")  # psabi: vectors in arguments, but of inlined functions only
# Optimisers warn of more; shorter vectors are other types in the same lines.
SHORTER = [("-mno-avx512f", "-fsyntax-only"), ("-mno-avx", "-fsyntax-only")] if platform.machine() == "x86_64" else []
VECTORS = [(), *SHORTER]


def test_these_are_all_sources() -> None:
    package = Path(commhooks.__file__).parent
    assert set(SOURCES) == set(package.rglob("*.c"))


@pytest.mark.parametrize("vectors", VECTORS, ids=str)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_no_warning(compiler: str, vectors: tuple[str, ...], tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    for source, flags in SOURCES.items():
        for real in library.C_TYPES.values():
            command = [compiler, *library.FLAGS, *flags, *WARNINGS, *vectors, f"-DREAL={real}"]
            command += [f"-I{library.HEADERS}", str(source), "-o", str(tmp_path / "library.so")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=280)
            assert done.returncode == 0, (command, done.stderr)


def test_stray_files_are_no_part_of_a_kernel(tmp_path: Path) -> None:
    """What editors and systems leave in the folder of one rank neither fails nor makes another build of it."""
    for source in SOURCES:
        copy = Path(shutil.copytree(source.parent, tmp_path / source.stem)) / source.name
        wanted = library.source_text(source)
        assert library.source_text(copy) == wanted
        (copy.parent / "a folder").mkdir()
        (copy.parent / "a folder.h").mkdir()
        (copy.parent / f"{source.name}~").write_bytes(b"\xff")
        (copy.parent / ".DS_Store").symlink_to("nowhere")
        assert library.source_text(copy) == wanted


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
    with pytest.raises(commhooks.HookRunError, match=rf"needs {numel} numbers of torch.float32 .* and got a tensor of"):
        address(tensor, torch.float32, numel)
    good = torch.zeros(2, 3)
    assert address(good, torch.float32, 6) == good.data_ptr()
