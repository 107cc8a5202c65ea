# ruff: noqa: F401
"""The internal names that the Lightning and Accelerate plugins may import, in addition to
`commhooks.errors`.
"""

from commhooks.checkpoint import parts as payload_parts
from commhooks.checkpoint.parts import cut_off
from commhooks.errors import check_version, print_error_on_rank_zero
from commhooks.gradients.loss_scale import LossScale, ScaleOf
from commhooks.gradients.torch_private import compiled_from
from commhooks.hook.attach import attach_request
from commhooks.hook.dcp_folder import DCPFolder, nothing_saved
from commhooks.hook.late_parameters import warn_of_unsharded
from commhooks.hook.meter import NAMES, PREFIX, Meter
from commhooks.options import HookConfig, check_choice, converted, plain
from commhooks.registry import COMPRESSORS, OFF, means_no_hook
from commhooks.request import (
    ARGUMENTS,
    HookRequest,
    arguments_in,
    check_arguments,
    check_value,
    import_path,
    suggests_arguments,
)
