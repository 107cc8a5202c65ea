"""The public names of features that can be taken out, a line for each; see CONTRIBUTING.md."""

# ruff: noqa: F403
from commhooks.auto.options import *
from commhooks.compressors.powersgd.options import *
from commhooks.compressors.quantized.options import *
from commhooks.ddp_comm_hooks.names import *
from commhooks.local_steps.options import *
from commhooks.members.options import *
from commhooks.sharded.options import *
