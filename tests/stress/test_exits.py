"""How `make exits` counts."""

import os
import subprocess
import time

from tests.stress import exits


def test_a_rank_that_hangs_does_not_count_for_the_other() -> None:
    hangs, ends = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["false"])
    os.waitid(os.P_PID, ends.pid, os.WEXITED | os.WNOWAIT)
    deadline = time.monotonic() + 0.2
    assert exits._waited_for(hangs.pid, deadline) == "hung"
    assert exits._waited_for(ends.pid, deadline) == 1
