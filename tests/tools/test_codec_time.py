"""`commhooks plan` times what the training runs: on an accelerator the exchange with stacks and masks."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from commhooks import PowerSGD
from commhooks.compressors.powersgd.compressor import PowerSGDCompressor
from commhooks.compressors.unit_plan import ParameterInfo
from commhooks.gradients.names import ModelNames
from commhooks.tools.codec_time import ROUNDS, measure_codec
from tests.support.kernels import computing_with
from tests.support.models import masks

STEPS = ROUNDS + 1  # one to warm up
SHAPES = [(24, 16), (24, 16), (10, 40)]


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **kwargs or {})


@computing_with("torch")
@pytest.mark.parametrize("rank", [2, {"?": 2}])
@pytest.mark.parametrize("accelerator", [False, True])
def test_the_exchange_of_the_device_is_timed(accelerator: bool, rank: int | dict[str, int]) -> None:
    compressor = PowerSGDCompressor(PowerSGD(matrix_approximation_rank=rank, start_powerSGD_iter=0))
    parameters = {str(i): torch.empty(shape, device="meta") for i, shape in enumerate(SHAPES)}
    names = ModelNames(parameters.items())
    plans = compressor.plan([ParameterInfo.of(n, p, names, compressor.config) for n, p in parameters.items()])
    with masks(accelerator), _Operators() as operators:
        timed = measure_codec(compressor, plans, torch.device("cpu"))
    assert timed.seconds > 0 and timed.share == 1
    if accelerator:  # Cholesky factors, no Householder QR, and no number for the host
        assert operators.names.count("linalg_cholesky_ex") >= STEPS
        assert not {"linalg_qr", "_local_scalar_dense", "is_nonzero", "nonzero"} & set(operators.names)
    else:
        assert operators.names.count("linalg_qr") == STEPS * len(SHAPES)
        assert "linalg_cholesky_ex" not in operators.names
