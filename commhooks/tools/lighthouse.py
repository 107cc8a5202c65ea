"""`commhooks lighthouse`."""

import argparse
import os
import threading

from commhooks.errors import CommandError
from commhooks.members.addresses import host_for_others
from commhooks.members.lighthouse import VARIABLE, check_torchft

_QUORUM_TICK_MS = 50


def run(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("RUST_LOG", "error")
    check_torchft()
    from torchft.coordination import LighthouseServer

    limits = {"wait-s": arguments.wait_s, "heartbeat-timeout-s": arguments.heartbeat_timeout_s}
    for name, seconds in limits.items():
        if not 0 < seconds < float("inf"):
            raise CommandError(f"--{name} {seconds:g}; expected seconds, more than 0")
    try:
        server = LighthouseServer(
            f"[::]:{arguments.port}",
            1,
            join_timeout_ms=int(arguments.wait_s * 1000),
            heartbeat_timeout_ms=int(arguments.heartbeat_timeout_s * 1000),
            quorum_tick_ms=_QUORUM_TICK_MS,
        )
    except Exception as error:  # torchft raises RuntimeError
        raise CommandError(f"the lighthouse cannot use port {arguments.port}: {error}") from error
    port = server.address().rpartition(":")[2]
    try:
        print(f"export {VARIABLE}=http://{host_for_others()}:{port}", flush=True)
        print(
            "Set this on every machine, or another address of this one that they reach. Ctrl-C"
            " ends it.",
            flush=True,
        )
        # Wake up now and then: a signal that comes just before a wait without a limit would not end
        # it.
        while not threading.Event().wait(1.0):
            pass
    except KeyboardInterrupt:
        server.shutdown()
