"""What the pool (`workers.py`) and a worker (`worker_side.py`) send each other."""

import dataclasses
import io
from typing import Any

import torch

FINISH_TIMEOUT_S = 15.0  # for destroying the group and looking for leaks


@dataclasses.dataclass(frozen=True)
class RankFailure:
    """What one rank raised: the name of the exception's class, its text, and the traceback as text."""

    type_name: str
    message: str
    traceback: str


def to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
