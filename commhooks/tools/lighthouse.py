"""`commhooks lighthouse`."""

import argparse
import os
import socket
import threading

from commhooks.comm.membership import VARIABLE, check_torchft
from commhooks.errors import CommandError


def run(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("RUST_LOG", "error")
    check_torchft()
    from torchft.coordination import LighthouseServer

    try:
        server = LighthouseServer(f"[::]:{arguments.port}", 1, join_timeout_ms=int(arguments.wait_s * 1000))
    except Exception as error:  # torchft raises RuntimeError
        raise CommandError(f"the lighthouse cannot use port {arguments.port}: {error}") from error
    port = server.address().rpartition(":")[2]
    try:
        print(f"export {VARIABLE}=http://{socket.gethostname()}:{port}", flush=True)
        print("Set this on every machine, with an address of this machine that they reach. Ctrl-C ends it.", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        server.shutdown()
