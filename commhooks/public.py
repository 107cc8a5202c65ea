"""The public names, without those of `features.py`. The first access to a public name in
`commhooks` imports both modules, and with them torch.
"""

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
from commhooks.compressors.unit_plan import ParameterInfo, UnitPlan
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
from commhooks.options import HookConfig
from commhooks.registry import available_hooks, register_compressor, register_hook

__all__ = [
    "RESIDUAL",
    "AllReduce",
    "AttachError",
    "BF16Compress",
    "BucketLayout",
    "CommHook",
    "CommHookError",
    "CommandError",
    "Compressor",
    "Exchange",
    "FP16Compress",
    "HookConfig",
    "HookConfigError",
    "HookRunError",
    "Noop",
    "ParameterInfo",
    "PayloadError",
    "Send",
    "State",
    "StateField",
    "StepInfo",
    "UnitPlan",
    "Verdict",
    "attach",
    "available_hooks",
    "keep_residual",
    "register_compressor",
    "register_hook",
    "with_residual",
]
