"""The public names. The first access to one of them in `commhooks` imports this module, and with it
torch.
"""

import commhooks.ddp_comm_hooks as ddp_comm_hooks
from commhooks.auto.options import Auto
from commhooks.compressors.base import (
    RESIDUAL,
    Compressor,
    Exchange,
    Send,
    State,
    StateField,
    StepInfo,
    Verdict,
)
from commhooks.compressors.cast import AllReduce, BF16Compress, FP16Compress, Noop
from commhooks.compressors.error_feedback import keep_residual, with_residual
from commhooks.compressors.powersgd.options import BatchedPowerSGD, PowerSGD
from commhooks.compressors.quantized.options import Int4Compress, Int8Compress
from commhooks.compressors.unit_plan import ParameterInfo, UnitPlan
from commhooks.ddp_comm_hooks.debugging_hooks import noop_hook
from commhooks.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from commhooks.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)
from commhooks.errors import (
    AttachError,
    CommandError,
    CommHookError,
    HookConfigError,
    HookRunError,
    PayloadError,
)
from commhooks.gradients.layout import BucketLayout
from commhooks.hook.attach import attach
from commhooks.hook.comm_hook import CommHook
from commhooks.local_steps.options import DiLoCo, LocalSGD
from commhooks.members.options import Torchft
from commhooks.options import HookConfig
from commhooks.registry import available_hooks, register_compressor, register_hook
from commhooks.sharded.options import Shards

__all__ = [
    "RESIDUAL",
    "AllReduce",
    "AttachError",
    "Auto",
    "BF16Compress",
    "BatchedPowerSGD",
    "BucketLayout",
    "CommHook",
    "CommHookError",
    "CommandError",
    "Compressor",
    "DiLoCo",
    "Exchange",
    "FP16Compress",
    "HookConfig",
    "HookConfigError",
    "HookRunError",
    "Int4Compress",
    "Int8Compress",
    "LocalSGD",
    "Noop",
    "ParameterInfo",
    "PayloadError",
    "PowerSGD",
    "PowerSGDState",
    "Send",
    "Shards",
    "State",
    "StateField",
    "StepInfo",
    "Torchft",
    "UnitPlan",
    "Verdict",
    "allreduce_hook",
    "attach",
    "available_hooks",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "ddp_comm_hooks",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "keep_residual",
    "noop_hook",
    "powerSGD_hook",
    "register_compressor",
    "register_hook",
    "with_residual",
]
