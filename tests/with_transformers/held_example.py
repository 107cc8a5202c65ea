"""Runs the Trainer's example until a step, and stays there until it is killed.

    python held_example.py STEP SCRIPT ARGUMENTS...

Each rank writes `held_RANK` beside the folder of the checkpoints when it is there.
"""

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, trainer


class Hold(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == STEP:
            Path(f"{args.output_dir}_held_{os.environ['RANK']}").touch()
            time.sleep(1000)


if __name__ == "__main__":
    STEP = int(sys.argv[1])
    trainer.DEFAULT_CALLBACKS.append(Hold)
    del sys.argv[:2]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
