"""Python processes that have imported torch, Lightning and the like already.

    # instead of sys.executable
    command = [warm.python("lightning.pytorch"), "script.py", "argument"]

Half of the time of a short training in its own process is the import of the framework.
`warm.python` is a program that takes Python's command line, requests a process from a server, and
represents it: it forwards signals and ends as that process ends. The server has imported the
frameworks once and forks. The process has its own environment variables, folder, `sys.path`,
`__main__` and session, and the file descriptors and the network of the program that represents it.
commhooks is imported in it too, unless its `sys.path` leads to another copy. Processes that it
starts by `sys.executable` or multiprocessing are forked as well. Do not use this in tests of the
start itself, or of Ctrl-C for a whole process group.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.machinery
import marshal
import multiprocessing.spawn
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from pathlib import Path
from typing import Any

# ---- in the tests --------------------------------------------------------------------------------

_servers: dict[int, tuple[subprocess.Popen[bytes], Path]] = {}
SHARED = "COMMHOOKS_WARM_SERVERS"
_ALWAYS = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "hypothesis",
    "omegaconf",
    "pytest",
    "commhooks.public",
    "commhooks.compressors.powersgd.compressor",
    "commhooks.compressors.quantized.compressor",
    "commhooks.ddp_comm_hooks.names",
    "commhooks.hook.compressor_hook",
    "commhooks.hook.local_steps_hook",
    "commhooks.hook.sharded_source",
    "commhooks.members.machine_partner",
    "commhooks.members.members",
)
"""commhooks, and what it and the tests import themselves."""
_OF_KERNELS = ("CC", "HOME", "PATH", "XDG_CACHE_HOME")
"""The environment variables that say how the C kernels are compiled, and where they are kept."""


def python(*modules: str, server: int = 0) -> str:
    """Return a program to use instead of `sys.executable`. `modules` are imported in the server
    before it forks.
    """
    if not hasattr(os, "pidfd_open"):
        return sys.executable
    shared = os.environ[SHARED].split(os.pathsep) if SHARED in os.environ else []
    if server < len(shared):
        folder = Path(shared[server])
    else:
        if server not in _servers or _servers[server][0].poll() is not None:
            _servers[server] = _start()
        folder = _servers[server][1]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(folder / "socket"))
        data = marshal.dumps({"modules": [*_ALWAYS, *modules]})
        connection.sendall(len(data).to_bytes(8, "big") + data)
        answer = connection.makefile().read()
    assert answer == "ready", answer
    return str(folder / "python")


def share() -> None:
    """Make tests that this process starts use its servers 0 and 1."""
    for server in (0, 1):
        if server not in _servers:
            _servers[server] = _start()
    os.environ[SHARED] = os.pathsep.join(str(_servers[server][1]) for server in (0, 1))


def _start() -> tuple[subprocess.Popen[bytes], Path]:
    folder = Path(tempfile.mkdtemp(prefix="commhooks-warm-"))
    stub, program = folder / "python", folder / "stub.py"
    program.write_text(f"SOCKET = {str(folder / 'socket')!r}\nREAL = {sys.executable!r}\n{_STUB}")
    # Not Python in its first line: there may be a space in the path.
    stub.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {shlex.quote(str(program))} "$@"\n'
    )
    stub.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["RUST_LOG"] = "off"  # read when torchft is imported
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder), str(write), str(stub)],
        env=env,
        pass_fds=[write],
        cwd=folder,
    )
    os.close(write)
    os.read(read, 1)  # it listens
    os.close(read)
    atexit.register(_stop, process, folder)
    return process, folder


def _stop(process: subprocess.Popen[bytes], folder: Path) -> None:
    process.kill()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


# What `python(...)` leads to: started often, so it imports little; json, socket and signal would
# double its time.
_STUB = """
import os, sys

words = sys.argv[1:]
unbuffered = False
while words[:1] in (["-u"], ["-B"]):  # multiprocessing passes -B on
    unbuffered |= words.pop(0) == "-u"
if not words or words[0].startswith("-") and words[0] not in ("-m", "-c"):
    os.execv(REAL, [REAL, *sys.argv[1:]])
import _signal as signal, _socket as socket, array, marshal


def is_open(descriptor):
    try:
        os.get_inheritable(descriptor)
        return True
    except OSError:
        return False


def answer():
    line = b""
    while not line.endswith(b"\\n") and (more := connection.recv(1)):
        line += more
    return int(line or -9)  # without an answer: the server is gone, and the process with it


descriptors = [each for each in map(int, os.listdir("/proc/self/fd")) if is_open(each)]
connection = socket.socket(socket.AF_UNIX)
connection.connect(SOCKET)
request = {"words": words, "unbuffered": unbuffered}
request |= {"environ": dict(os.environ), "folder": os.getcwd()}
request |= {"descriptors": descriptors, "stub": os.getpid()}
data = marshal.dumps(request)
data = len(data).to_bytes(8, "big") + data
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
sent = connection.sendmsg([data], rights)
connection.sendall(data[sent:])
pid = answer()


def pass_on(signum, frame):
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass


for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
    if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN:
        signal.signal(getattr(signal, name), pass_on)
status = answer()
if status >= 0:
    os._exit(status)
signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
os.kill(os.getpid(), -status)
"""

# ---- in the server -------------------------------------------------------------------------------


def _serve(folder: Path, ready: int) -> dict[str, Any]:
    """Run the server. Returns only in the processes that it forks, with their requests."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    os.write(ready, b"1")
    os.close(ready)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, "asked")
    selector.register(os.pidfd_open(os.getppid()), selectors.EVENT_READ, "alone")
    # process id -> connection to the program that stands for it
    running: dict[int, socket.socket] = {}
    stands_for: dict[int, int] = {}  # that program -> process id
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    # a kill is to arrive at once, also where the machine is busy
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, usual - 10)
    while True:
        for key, _ in selector.select():
            if key.data == "alone":  # the tests are over
                for pid in running:
                    _kill(pid, {})
                os._exit(0)
            elif key.data == "asked":
                connection, _ = listener.accept()
                request = _receive(connection)
                if request is None:
                    continue
                if "modules" in request:
                    connection.sendall(_import(request["modules"]))
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    os.setpriority(os.PRIO_PROCESS, 0, usual)
                    for key in list(selector.get_map().values()):
                        os.close(key.fd)
                    selector.close()
                    return request
                for descriptor in request["received"]:
                    os.close(descriptor)
                running[pid] = connection
                stands_for[request["stub"]] = pid
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, ("ended", pid))
                selector.register(connection, selectors.EVENT_READ, ("left", pid))
                # somebody has killed the program that asked: "left" comes next
                with contextlib.suppress(OSError):
                    connection.sendall(f"{pid}\n".encode())
            elif key.data[1] in running:
                kind, pid = key.data
                # somebody has killed the program that stands for it; "ended" comes next
                if kind == "left":
                    selector.unregister(running[pid])
                    _kill(pid, stands_for)
                    continue
                selector.unregister(key.fd)
                os.close(key.fd)
                connection = running.pop(pid)
                stands_for = {stub: other for stub, other in stands_for.items() if other != pid}
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if connection.fileno() in selector.get_map():
                    selector.unregister(connection)
                    # somebody has killed the program at this very moment
                    with contextlib.suppress(OSError):
                        connection.sendall(f"{status}\n".encode())
                connection.close()


def _kill(pid: int, stands_for: dict[int, int]) -> None:
    """Kill a process and all that it has started, in its session or from this server."""
    for stub, other in stands_for.items():
        with contextlib.suppress(OSError):  # it has ended by itself
            if int(Path(f"/proc/{stub}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                _kill(other, stands_for)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not come to `setsid` yet
        os.kill(pid, signal.SIGKILL)


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """Receive a request; None if the program that sent it was killed meanwhile."""
    received: list[int] = []
    try:
        data, received, _, _ = socket.recv_fds(connection, 65536, 250)
        while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "big"):
            more = connection.recv(65536)
            if not more:
                raise EOFError
            data += more
    except (OSError, EOFError):
        for descriptor in received:
            os.close(descriptor)
        connection.close()
        return None
    return marshal.loads(data[8:]) | {"received": received}


def _import(modules: list[str]) -> bytes:
    for module in modules:
        if module not in sys.modules:
            with contextlib.suppress(ImportError):  # who needs it will say so
                importlib.import_module(module)
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = (
            False  # torch's operators: taken out one by one at the end of each process
        )
    if rendezvous := sys.modules.get("torch.distributed.elastic.rendezvous.dynamic_rendezvous"):
        rendezvous.get_method_name = _method_name
    _build_kernels()
    gc.collect()
    # so that a collection in a forked process does not touch, and thereby copy, all of this
    gc.freeze()
    return b"ready"


@functools.cache
def _build_kernels() -> None:
    """Load the C kernels, and compute what tells builds apart, which takes PowerSGD a third of a
    second in each process.
    """
    import torch

    from commhooks.compressors.native import library
    from commhooks.compressors.powersgd import cpu
    from commhooks.compressors.quantized import kernels

    with contextlib.suppress(Exception):  # who needs them will say so
        for results_of in (cpu.results_of, kernels.results_of):
            library.build(torch.device("cpu"), results_of)


def _method_name(depth: int = 2) -> str:
    """Return what torchrun's function returns, without reading the sources of the whole stack."""
    return sys._getframe(depth).f_code.co_name


# ---- in the forked processes ---------------------------------------------------------------------


def _become(request: dict[str, Any], stub: str) -> None:
    """Do what Python does between its start and the first line of a program."""
    os.setsid()
    _enter_namespaces(request["stub"])
    # Move descriptors to high numbers first, because the number of one may be the target of
    # another.
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 1000) for descriptor in request["received"]]
    for descriptor in request["received"]:
        os.close(descriptor)
    for descriptor, number in zip(high, request["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["folder"])
    before = {name: os.environ.get(name) for name in _OF_KERNELS}
    os.environ.clear()
    os.environ.update(request["environ"])
    if before != {name: os.environ.get(name) for name in _OF_KERNELS}:
        sys.modules["commhooks.compressors.native.library"].load.cache_clear()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(
            line_buffering=stream is sys.stderr or os.isatty(1), write_through=request["unbuffered"]
        )
    tempfile.tempdir = None  # TMPDIR is another one
    sys.executable = stub
    multiprocessing.spawn.set_executable(stub)
    path = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:1] = path  # the first was the folder of this file
    sys.argv[:] = request["words"]
    if sys.argv[0] == "-m":
        sys.path.insert(0, os.getcwd())
        del sys.argv[0]
        _forget_another_copy()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if sys.argv[0] == "-c":
        sys.path.insert(0, "")
        code = compile(sys.argv.pop(1), "<string>", "exec")
    else:
        script = main.__file__ = os.path.abspath(sys.argv[0])
        sys.path.insert(0, os.path.dirname(script))
        code = compile(Path(script).read_bytes(), script, "exec")
    _forget_another_copy()
    exec(code, main.__dict__)


def _forget_another_copy() -> None:
    """Let this process import commhooks anew if its `sys.path` leads to another copy."""
    if tables := sys.modules.get("commhooks.compressors.native.tables"):
        tables._IMPORTED_IN = os.getpid()  # this is no fork of a program that has used OpenMP
    spec = importlib.machinery.PathFinder.find_spec("commhooks")
    if spec is not None and spec.origin != getattr(sys.modules.get("commhooks"), "__file__", None):
        for name in [name for name in sys.modules if name.partition(".")[0] == "commhooks"]:
            del sys.modules[name]


def _enter_namespaces(pid: int) -> None:
    """Enter the namespaces of the program that represents this process; `mnt` includes /sys."""
    for kind in ("net", "mnt"):
        theirs = f"/proc/{pid}/ns/{kind}"
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{kind}"):
            with open(theirs) as file:
                assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0


def _status_of(request: dict[str, Any], stub: str) -> int:
    try:
        _become(request, stub)
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.last_value = error  # as the interpreter does, for what runs at exit
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _end(status: int) -> None:
    """End as Python does, but do not destroy modules, which takes half a second for torch alone."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    sys.path[0] = (
        # not this file's folder: transformers would take its kernels.py for a package of that name
        ""
    )
    task = _serve(Path(sys.argv[1]), int(sys.argv[2]))
    _end(_status_of(task, sys.argv[3]))
