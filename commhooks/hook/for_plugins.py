# ruff: noqa: F401
"""Internal names that the Lightning and Accelerate plugins use. Change them together with the plugins."""

from commhooks.checkpoint import parts as payload_parts
from commhooks.checkpoint.cut_off import cut_off
from commhooks.compressors.dotted_path import import_path
from commhooks.compressors.hook_config import HookConfig
from commhooks.compressors.plain_values import checked
from commhooks.gradients.loss_scale import LossScale, ScaleOf
from commhooks.gradients.torch_private import compiled_from
from commhooks.hook.announce import reason_first
from commhooks.hook.arguments import arguments_in, explains_arguments
from commhooks.hook.attach import attach_request
from commhooks.hook.checked_state import located, nothing_saved
from commhooks.hook.hook_folder import HookFolder
from commhooks.hook.metrics import NAMES, PREFIX, Meter
from commhooks.hook.request import HookRequest
from commhooks.hook.supported import check_version
from commhooks.hook.vocabulary import ARGUMENTS, check_arguments, check_choice, check_value
from commhooks.registry import COMPRESSORS, OFF, means_no_hook
