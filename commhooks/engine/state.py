"""Define learned state, which a compressor keeps from step to step, and its lock.

On an accelerator the outcome of a pass stays on the device, and the host reads it only when it is
needed.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch

from commhooks.comm.counters import Counters
from commhooks.compressors.state_field import StateField
from commhooks.engine.streams import CommitMark
from commhooks.errors import HookConfigError
from commhooks.gradients import precision
from commhooks.gradients.loss_scale import LossScale, chosen

Entries = dict[str, dict[str, torch.Tensor]]


@dataclass
class LearnedState:
    """Holds tensors by field and by name, as in `state["residual"]["layer.weight"]`.

    The names are independent of the bucket layout. Pickles of `PowerSGDState` hold the attributes
    by name, so do not rename them.

    Attributes:
        step: number of committed synchronised backward passes, the same on every rank.
        nonfinite_steps: number of passes that were not committed.
        entries: for each field (see `StateField`) a dict with a tensor per parameter or bucket. A
            missing entry means zeros, or the initial value that the compressor draws.
        local: keys of the fields that differ between ranks, such as residuals.
        loss_scale: the loss scale of the stored fields with `scales_with_loss`. On an accelerator a
            0-dim tensor until the host reads it.
        local_missing: whether this rank has lost its local tensors. At the next comparison all
            ranks then drop theirs.
        local_shared: whether the local tensors of rank 0 stand for those of all ranks: the mean
            just saved or loaded, no tensors, or tensors that rank 0 alone has, because it alone
            exchanges.
    """

    step: int = 0
    nonfinite_steps: int = 0
    entries: Entries = dataclasses.field(default_factory=dict)
    local: frozenset[str] = frozenset({"residual"})
    loss_scale: LossScale = 1.0
    local_missing: bool = False
    missing_was_said: bool = False
    local_shared: bool = True

    @classmethod
    def of(cls, fields: Iterable[StateField]) -> "LearnedState":
        fields = list(fields)
        keys = [field.key for field in fields]
        if len(set(keys)) < len(keys):
            raise HookConfigError(f"state_fields: the keys {keys} are not all different")
        return cls(local=frozenset(field.key for field in fields if not field.replicated))

    def __getitem__(self, key: str) -> dict[str, torch.Tensor]:
        return self.entries.setdefault(key, {})

    def compact_copy(self) -> "LearnedState":
        """Copy the state without slices of larger storages.

        Pickling a slice would save the whole storage.
        """
        return dataclasses.replace(
            self, entries={key: _without_slices(self.entries[key]) for key in self.entries}
        )

    def keep_fields(self, fields: Iterable[StateField]) -> None:
        for key in self.entries.keys() - {field.key for field in fields}:
            del self.entries[key]

    def forget_replicated(self) -> None:
        for key in self.entries.keys() - self.local:
            self.entries[key].clear()

    def forget_local(self) -> None:
        """Delete the local tensors without changing the flags; compare `drop_local`."""
        for key in self.local:
            self[key].clear()

    def drop_local(self) -> None:
        """Delete the local tensors. Call this on all ranks, which then continue from zeros."""
        self.forget_local()
        self.local_missing = False
        self.local_shared = True

    def rescale(
        self, fields: Iterable[StateField], factor: LossScale, but: Collection[str]
    ) -> None:
        """Multiply the fields that are proportional to the loss, without the names in `but`."""
        for field in fields:
            if field.scales_with_loss:
                for name, tensor in self[field.key].items():
                    if name not in but:
                        tensor.mul_(factor)

    def to_host(self) -> None:
        for tensors in self.entries.values():
            tensors.update((name, tensor.cpu()) for name, tensor in tensors.items())

    def has_local(self) -> bool:
        return any(self[key] for key in self.local)


def _without_slices(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
        for name, tensor in tensors.items()
    }


class HeldState:
    """Guards the learned state of a session, and counts its committed steps.

    Attributes:
        lock: hold it while writing the learned state, and while reading it from another thread.
        in_commit: whether a commit is writing. A save from a signal handler would then mix two
            steps.
        commit_failed: whether the latest commit failed on this rank, and no state was loaded since.
    """

    def __init__(self, state: LearnedState, counters: Counters) -> None:
        self.state = state
        self.lock = threading.RLock()
        self.in_commit = False
        self.commit_failed = False
        self._counters = counters
        self._mark = CommitMark()
        # Passes whose outcome the host has not read: how many were committed (on the device), how
        # many there were, and whether they count as compressed.
        self._unread: tuple[torch.Tensor, int, bool] | None = None

    def steps(self, start: int, *, exact: bool) -> tuple[int, int]:
        """Return the smallest and the largest possible number of committed steps.

        They differ while the outcome of some passes is unread. Synchronises with an accelerator
        only if `exact`, or if `start` lies in between.
        """
        # a save in another thread may be updating `state.step` and the unread passes
        with self.lock:
            smallest = self.state.step
            largest = smallest + (self._unread[1] if self._unread else 0)
            if largest > smallest and (exact or smallest < start <= largest):
                self.settle()
                smallest = largest = self.state.step
            return smallest, largest

    @contextlib.contextmanager
    def committing(self, device: torch.device) -> Iterator[None]:
        """Hold the lock while the body writes the gradients of a pass and the learned state."""
        with self.lock:
            self.in_commit = True
            try:
                yield
            except BaseException:
                # The tensors are now a mix of two steps, so none of them may be saved.
                self.state.forget_local()
                self.state.local_missing = self.commit_failed = True
                raise
            finally:
                if precision.has_streams(device):
                    self._mark.set(device)
                self.in_commit = False

    def add(self, verdict: torch.Tensor | bool, loss_scale: LossScale, *, compressed: bool) -> None:
        """Count a pass with this loss scale. Call this in the body of `committing`.

        `verdict` (a bool on the CPU, else a 0-dim bool tensor): whether the pass is committed.
        """
        if verdict is not False:
            before = self.state.loss_scale
            self.state.loss_scale = (
                loss_scale if verdict is True else chosen(verdict, loss_scale, before)
            )
            # After a failed commit the residuals start at zero. This commit has written them, so
            # they are valid again.
            self.state.local_missing = self.commit_failed = False
        if isinstance(verdict, bool) and self._unread is None:
            self._count(int(verdict), float(self.state.loss_scale), 1, compressed)
            return
        committed, passes, _ = self._unread or (torch.zeros((), dtype=torch.int64), 0, False)
        self._unread = (verdict + committed, passes + 1, compressed)

    def outcome(self, good: torch.Tensor) -> torch.Tensor:
        """Return the number of committed steps and `good`, as two integers on the host.

        `good`: whether the latest pass was committed. On CUDA the host does not wait; the integers
        are valid after the work that is queued now.
        """
        with self.lock:
            unread = torch.as_tensor(self._unread[0] if self._unread else 0, device=good.device)
            both = torch.stack((unread + self.state.step, good.to(torch.int64)))
        return both.to("cpu", non_blocking=precision.has_streams(good.device))

    def settle(self) -> None:
        """Bring `state.step` up to date.

        On an accelerator the host and the caller's current stream wait for the latest commit, so
        that the caller reads the learned state as written by that commit.
        """
        with self.lock:
            self._mark.wait()
            with self._mark.reading():
                self._read()

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Hold the lock of the learned state, with `state.step` up to date, while the body runs.

        The body may copy tensors of the state to the host, which waits only for the latest commit.
        Change tensors by `overwrite` only.
        """
        with self.lock, self._mark.reading():
            self._read()
            yield

    def overwrite(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        self._mark.overwrite(tensor, value)

    def _read(self) -> None:
        while (unread := self._unread) is not None:
            committed = int(unread[0].item())
            loss_scale = float(self.state.loss_scale)
            # A signal handler may have read and counted the passes while this thread waited for the
            # device.
            if self._unread is unread:
                self._count(committed, loss_scale, *unread[1:])

    def _count(self, committed: int, loss_scale: float, passes: int, compressed: bool) -> None:
        was_in_commit = self.in_commit
        self.in_commit = True
        try:
            self._unread = None
            self.state.step += committed
            self.state.nonfinite_steps += passes - committed
            self.state.loss_scale = loss_scale
            self._counters.compressed_steps += committed if compressed else 0
            self._counters.nonfinite_steps += passes - committed
        finally:
            self.in_commit = was_in_commit
