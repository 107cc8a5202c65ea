"""`commhooks env`: print what a bug report needs, such as versions, backends and kernels."""

import argparse
import importlib.metadata
import json
import os
import platform
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist

import commhooks
from commhooks.compressors.native import library
from commhooks.errors import HookConfigError
from commhooks.gradients.precision import arithmetic_of

PACKAGES = (
    "lightning",
    "pytorch-lightning",
    "accelerate",
    "transformers",
    "torchft",
    "triton",
    "omegaconf",
)


def run(arguments: argparse.Namespace) -> None:
    rows = environment()
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    width = max(map(len, rows))
    for name, text in rows.items():
        print(f"{name:<{width}}  {text}")


def environment() -> dict[str, str]:
    """Return what distinguishes this machine from others, by name. Needs no process group."""
    return {
        "commhooks": commhooks.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": torch.__version__,
        **{package: _version(package) for package in PACKAGES},
        "backends": ", ".join(_backends()) or "none: this torch has no torch.distributed",
        "gpus": _gpus(),
        "processor": (
            f"{arithmetic_of(torch.device('cpu'))}; {os.cpu_count()} cores,"
            f" {torch.get_num_threads()} threads"
        ),
        "native kernels": _native_kernels(),
        "interfaces": ", ".join(name for _, name in socket.if_nameindex()),
        **{
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("GLOO_", "NCCL_"))
        },
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _backends() -> list[str]:
    if not dist.is_available():
        return []
    available: dict[str, Callable[[], bool]] = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
    }
    return [name for name, is_available in available.items() if is_available()]


def _gpus() -> str:
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    built = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
    return ", ".join(names) or f"none; torch was built {built}"


def _native_kernels() -> str:
    if library.is_switched_off():
        return f"turned off by {library.SWITCH}=0"
    try:
        library.load()
    except HookConfigError as error:
        return str(error)
    return "compiled and loaded"
