"""Copy state other than trained weights from rank 0: buffers, frozen parameters, optimizers, the
GradScaler.

This state is copied and not averaged, because a mean over ranks is often inconsistent: moments,
8-bit codes with their scales, the vectors of a spectral norm, observers that start at infinity,
masks. In a sharded model rank 0 means the rank of the first replica that holds the same shard.
"""

import contextlib
import functools
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commhooks.comm import collectives
from commhooks.comm.collectives import (
    agreement_key,
    broadcast_first,
    checksum,
    gather_rows,
    gather_texts,
)
from commhooks.comm.counters import Counters
from commhooks.gradients.layout import bytes_of
from commhooks.gradients.loss_scale import LossScale, scaler_of
from commhooks.gradients.names import own_name
from commhooks.gradients.source import GradientSource
from commhooks.local_steps.events import TrainingEvents

Node = tuple[str, Any]
"""A kind and its content, which describe a value without its tensors:

"tensor": the fields of a `_Leaf`; "dict", and "components" of a tensor made of tensors, such as a
DTensor: nodes by name; "list", "tuple": nodes; "value": the value itself; "own": None, because the
value is not shared.
"""

Part = tuple[Any, Callable[[Any], None]]
"""The value of a part of the state, and the function that sets it."""


class Outcome(NamedTuple):
    """What `CommonState.share` has found.

    Attributes:
        differing: labels of the parts that still differ, because only some ranks have them.
        flagged: whether a rank has passed `flag`.
    """

    differing: list[str]
    flagged: bool


_WHAT = "the state of rank 0"
_MESSAGE_BYTES = 64 * 2**20
_ALIGNED = 16  # bytes, so that a part of a message can be viewed in any dtype


class CommonState:
    """Shares state among the ranks. All ranks must call each method at the same point of the
    training. `loss_scale` is as passed to `attach`; if it belongs to a GradScaler, the GradScaler
    is shared, too.
    """

    def __init__(
        self,
        source: GradientSource,
        events: TrainingEvents,
        loss_scale: Callable[[], LossScale] | None,
        counters: Counters,
    ) -> None:
        self._loss_scale = loss_scale
        self._source, self._events, self._counters = source, events, counters

    @torch.no_grad()
    def share(
        self, *, optimizers: bool, flag: bool = False, group: dist.ProcessGroup | None = None
    ) -> Outcome:
        """Copy rank 0's state to all ranks of `group` (None: the group of the model). Tensors that
        are equal on all ranks are not sent. `optimizers`: whether to share the optimizers and the
        GradScaler, in addition to buffers and frozen parameters. `flag`: of this rank, for
        `Outcome.flagged`. The result is the same on all ranks.
        """
        group, device = self._source.group if group is None else group, self._source.device
        # 1. Compare descriptions and checksums: usually everything is equal.
        own, tensors = self._parts(optimizers=optimizers), list[torch.Tensor]()
        described = {label: _described(value, tensors) for label, (value, _) in own.items()}
        sums = checksums(tensors)
        keys = [agreement_key(described), agreement_key(sums), int(flag)]
        of_ranks = gather_rows(torch.tensor(keys, device=device), group, self._counters, _WHAT)
        same_form, same_bits, _ = (of_ranks == of_ranks[0]).all(0).tolist()
        flagged = bool(of_ranks[:, -1].any())
        if same_form and same_bits:
            return Outcome([], flagged)
        # 2. Compare tensor by tensor with the description of rank 0.
        first = described if same_form else self._of_first(described, group)
        leaves, mine = (
            {path: leaf for label, node in each.items() for path, leaf in _leaves(node, label)}
            for each in (first, described)
        )
        row = [
            (sums[mine[path].number], 1)
            if path in mine and mine[path].form == leaf.form
            else (0, 0)
            for path, leaf in leaves.items()
        ]
        rows = gather_rows(
            torch.tensor(row, device=device).view(-1, 2), group, self._counters, _WHAT
        )
        wanted = (rows != rows[0]).any(0).any(1).tolist()
        # 3. Broadcast the tensors that differ on some rank, and set the state.
        arrived = self._receive(
            [x for x, each in zip(leaves.values(), wanted, strict=True) if each], tensors, group
        )
        differing = self._set(own, first, arrived) if group.rank() else set()
        if same_form:
            return Outcome([], flagged)
        found = gather_texts("\n".join(differing if group.rank() else ()), group, device, _WHAT)
        return Outcome(sorted({each for text in found for each in text.splitlines()}), flagged)

    def _parts(self, *, optimizers: bool) -> dict[str, Part]:
        """Map the label in messages of each part of the state to its value and the function that
        sets it.
        """
        found: dict[str, Part] = {}
        module, trained = self._source.module, self._source.names.named_parameters()
        known = {id(each) for each in trained.values()}
        for name, each in module.named_buffers() if module is not None else ():
            found[f"buffer {name}"] = each, functools.partial(_set_buffer, module, name)
        for name, each in self._source.weights().items():
            if id(each) not in known and own_name(name) not in trained:
                found[f"frozen parameter {name}"] = each, functools.partial(_check_same, each)
        for optimizer in self._events.known() if optimizers else ():
            parameters = _parameters(optimizer)
            label = f"the state of {type(optimizer).__name__} with {len(parameters)} parameters"
            same = sum(other.startswith(label) for other in found)
            state = {
                i: optimizer.state[p] for i, p in enumerate(parameters) if p in optimizer.state
            }
            groups = [
                {k: v for k, v in each.items() if k != "params"} for each in optimizer.param_groups
            ]
            names = " | ".join(self._names_of(group["params"]) for group in optimizer.param_groups)
            set_value = functools.partial(_set_optimizer, optimizer, names)
            # the key ensures that the groups have the same parameters
            value = {names: {"state": state, "groups": groups}}
            found[label + (f" ({same + 1})" if same else "")] = value, set_value
        if optimizers and (scaler := scaler_of(self._loss_scale)) is not None:
            found["the GradScaler"] = scaler.state_dict(), scaler.load_state_dict
        return found

    def rates(self) -> dict[str, Part]:
        """Map a label to what schedules change in an optimizer: its groups without parameters."""
        return {
            f"the learning rates of {type(optimizer).__name__} {place}": (
                [
                    {key: value for key, value in group.items() if key != "params"}
                    for group in optimizer.param_groups
                ],
                functools.partial(_set_groups, optimizer),
            )
            for place, optimizer in enumerate(self._events.known())
        }

    def _set(
        self,
        own: Mapping[str, Part],
        parts: Mapping[str, Node],
        arrived: Mapping[int, torch.Tensor],
    ) -> set[str]:
        """Set the parts of this rank's state to the described ones. Return the labels that only one
        side has.
        """
        differing = set(own.keys() ^ parts.keys())
        for label, node in parts.items():
            value, set_value = own.get(label, (None, functools.partial(self._set_new, label)))
            try:
                set_value(_rebuilt(value, node, arrived))
                differing.discard(label)
            except _CannotRebuild:
                differing.add(label)
        return differing

    def _set_new(self, label: str, value: Any) -> None:
        kind, _, name = label.partition(" ")
        if kind != "buffer" or not isinstance(value, torch.Tensor):
            raise _CannotRebuild
        _set_buffer(self._source.module, name, value)

    def _names_of(self, parameters: Sequence[torch.Tensor]) -> str:
        names = dict(
            zip(map(id, self._source.stepped()), self._source.names.named_parameters(), strict=True)
        )
        return " ".join(names.get(id(each), str(tuple(each.shape))) for each in parameters)

    def _of_first(self, described: dict[str, Node], group: dist.ProcessGroup) -> dict[str, Node]:
        device, file = self._source.device, io.BytesIO()
        torch.save(described, file)
        length = torch.tensor([file.tell()], device=device)
        broadcast_first(length, group, None, _WHAT)
        content = torch.zeros(int(length), dtype=torch.uint8)
        if group.rank() == 0:
            content.copy_(torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8))
        content = content.to(device)
        broadcast_first(content, group, self._counters, _WHAT)
        first: dict[str, Node] = torch.load(io.BytesIO(bytes_of(content.cpu())), weights_only=True)
        return first

    def _receive(
        self, leaves: Sequence["_Leaf"], own: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> dict[int, torch.Tensor]:
        """Broadcast tensors of rank 0, which sends them from `own`. Return them by their numbers on
        rank 0.
        """
        found: dict[int, torch.Tensor] = {}
        for piece in _messages(leaves):
            sizes = [-(-each.nbytes // _ALIGNED) * _ALIGNED for each in piece]
            message = torch.zeros(sum(sizes), dtype=torch.uint8, device=self._source.device)
            parts = [
                part[: each.nbytes] for part, each in zip(message.split(sizes), piece, strict=True)
            ]
            if group.rank() == 0:
                for part, each in zip(parts, piece, strict=True):
                    part.copy_(own[each.number].contiguous().view(-1).view(torch.uint8))
            broadcast_first(message, group, self._counters, _WHAT)
            for part, each in zip(parts, piece, strict=True):
                found[each.number] = part.view(each.dtype).view(each.shape)
        return found

    # ---- for a machine that is behind
    # --------------------------------------------------------------------------------

    def described(self, more: Mapping[str, Any]) -> tuple[bytes, list[torch.Tensor]]:
        """Describe all state of this rank, and the values `more` by label. Return the description
        and the tensors.
        """
        tensors, file = list[torch.Tensor](), io.BytesIO()
        values = {
            label: value for label, (value, _) in self._parts(optimizers=True).items()
        } | dict(more)
        torch.save({label: _described(value, tensors) for label, value in values.items()}, file)
        return file.getvalue(), tensors

    def read(
        self, form: bytes, read: Callable[[int, torch.Tensor], None]
    ) -> dict[int, torch.Tensor]:
        """Read the tensors of a description into host memory. Return them by their numbers."""
        found = {}
        for _, leaf in self._leaves_of(form):
            found[leaf.number] = torch.empty(leaf.shape, dtype=leaf.dtype)
            read(leaf.number, found[leaf.number])
        return found

    def spread(
        self, form: bytes, arrived: Mapping[int, torch.Tensor]
    ) -> tuple[bytes, Mapping[int, torch.Tensor]]:
        """Broadcast to all ranks of the model what rank 0 has read."""
        group, device = self._source.group, self._source.device
        if group.size() == 1:
            return form, arrived
        form = collectives.gather_bytes(form, group, device, _WHAT)[0]
        leaves = [leaf for _, leaf in self._leaves_of(form)]
        own = [arrived[number] for number in range(len(leaves))] if arrived else []
        return form, self._receive(leaves, own, group)

    @torch.no_grad()
    def take(
        self,
        form: bytes,
        arrived: Mapping[int, torch.Tensor],
        more: Mapping[str, Part],
    ) -> list[str]:
        """Set all state of this rank from another rank's description and tensors. `more`: this
        rank's values for the other rank's `more`, each with the function that sets it.

        Returns:
            Labels of the parts that only one of the two ranks has, and of the entries in `more` in
            which this rank keeps an object of its own because it cannot be sent.
        """
        parts: dict[str, Node] = torch.load(io.BytesIO(form), weights_only=True)
        differing = self._set(self._parts(optimizers=True) | dict(more), parts, arrived)
        return sorted(
            differing | {label for label in more if label in parts and _keeps_own(parts[label])}
        )

    @staticmethod
    def _leaves_of(form: bytes) -> list[tuple[str, "_Leaf"]]:
        parts: dict[str, Node] = torch.load(io.BytesIO(form), weights_only=True)
        return [each for label, node in parts.items() for each in _leaves(node, label)]

    def digest(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return a number that differs if the bits of the tensors differ."""
        return agreement_key(checksums(tensors))


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    sums = [0] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        read = torch.stack([checksum(tensors[place]) for place in places]).tolist()
        for place, value in zip(places, read, strict=True):
            sums[place] = value
    return sums


# ---- how a part of the state is set
# ----------------------------------------------------------------------------------


class _CannotRebuild(Exception):
    """Raised if this rank has no object into which the state of rank 0 can be copied."""


def _set_buffer(module: torch.nn.Module | None, name: str, value: Any) -> None:
    owner, _, own = name.rpartition(".")
    try:
        assert module is not None
        holder = module.get_submodule(owner)
    except AttributeError:
        raise _CannotRebuild from None
    if own not in dict(holder.named_buffers(recurse=False)):
        holder.register_buffer(own, value)
    elif getattr(holder, own) is not value:
        setattr(holder, own, value)


def _check_same(own: torch.Tensor, value: Any) -> None:
    if value is not own:
        raise _CannotRebuild


def _set_optimizer(optimizer: torch.optim.Optimizer, names: str, value: dict[str, Any]) -> None:
    if names not in value:
        raise _CannotRebuild
    state = value[names]["state"]
    for place, parameter in enumerate(_parameters(optimizer)):
        if place in state:
            optimizer.state[parameter] = state[place]
        else:
            optimizer.state.pop(parameter, None)
    _set_groups(optimizer, value[names]["groups"])


def _set_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    if len(groups) != len(optimizer.param_groups):
        raise _CannotRebuild
    for group, new in zip(optimizer.param_groups, groups, strict=True):
        group.update(new)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# ---- small values, in one message
# --------------------------------------------------------------------------------------------------


def packed_values(values: Mapping[str, Any]) -> bytes:
    """Return the values by label in one message, for `set_packed` of another process."""
    tensors, file = list[torch.Tensor](), io.BytesIO()
    described = {label: _described(value, tensors) for label, value in values.items()}
    content = {"values": described, "tensors": [tensor.cpu() for tensor in tensors]}
    torch.save(content, file)
    return file.getvalue()


def set_packed(message: bytes, parts: Mapping[str, Part]) -> None:
    """Set the parts that the message has. A part keeps what cannot be sent."""
    content = torch.load(io.BytesIO(message), weights_only=True)
    arrived = dict(enumerate(content["tensors"]))
    for label, (value, set_value) in parts.items():
        if label in content["values"]:
            with contextlib.suppress(_CannotRebuild):
                set_value(_rebuilt(value, content["values"][label], arrived))


# ---- a value described without its tensors
# ---------------------------------------------------------------------------


class _Leaf(NamedTuple):
    """Describes a tensor. `number` is its index in the list of all tensors."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool

    @property
    def form(self) -> tuple[tuple[int, ...], torch.dtype]:
        return self.shape, self.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _described(value: Any, tensors: list[torch.Tensor]) -> Node:
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return "components", {name: _described(getattr(value, name), tensors) for name in names}
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        tensors.append(value.detach())
        return "tensor", (
            len(tensors) - 1,
            tuple(value.shape),
            value.dtype,
            value.device.type == "cpu",
        )
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        return "dict", {key: _described(each, tensors) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value).__name__, [_described(each, tensors) for each in value]
    return (
        ("value", value)
        if value is None or type(value) in (bool, int, float, str)
        else ("own", None)
    )


def _leaves(node: Node, path: str) -> Iterator[tuple[str, _Leaf]]:
    kind, inner = node
    if kind == "tensor":
        yield path, _Leaf(*inner)
    elif kind not in ("value", "own"):
        for key, each in inner.items() if isinstance(inner, dict) else enumerate(inner):
            yield from _leaves(each, f"{path}/{key}")


def _keeps_own(node: Node) -> bool:
    kind, inner = node
    if kind in ("tensor", "value", "own"):
        return kind == "own"
    return any(map(_keeps_own, inner.values() if isinstance(inner, dict) else inner))


def _rebuilt(own: Any, node: Node, arrived: Mapping[int, torch.Tensor]) -> Any:
    """Set `own` to the value that `node` describes, in place where possible, and return it.
    `arrived` has tensors of rank 0 by number; tensors missing from it are equal in `own`.
    """
    kind, inner = node
    if kind == "own":
        return own
    if kind == "value":
        return inner
    if kind == "tensor":
        leaf = _Leaf(*inner)
        new = arrived.get(leaf.number)
        if isinstance(own, torch.Tensor) and (tuple(own.shape), own.dtype) == leaf.form:
            if new is None or (_is_expanded(own) and torch.equal(own, new.to(own.device))):
                return own
            if not _is_expanded(own):
                own.detach().copy_(new)
                return own
        if new is None:
            raise _CannotRebuild
        return new.to("cpu" if leaf.on_host else new.device, copy=True)
    if kind == "components":
        for name, each in inner.items():
            part = getattr(own, name, None)
            if part is None or _rebuilt(part, each, arrived) is not part:
                raise _CannotRebuild
        return own
    if kind == "dict":
        found = own if isinstance(own, dict) else {}
        for key in found.keys() - inner.keys():
            del found[key]
        for key, each in inner.items():
            found[key] = _rebuilt(found.get(key), each, arrived)
        return found
    fits = isinstance(own, (list, tuple)) and len(own) == len(inner)
    items = [
        _rebuilt(own[place] if fits else None, each, arrived) for place, each in enumerate(inner)
    ]
    if kind == "list" and isinstance(own, list):
        own[:] = items
        return own
    return items if kind == "list" else tuple(items)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements of `tensor` share memory, as after `expand`: torch writes none."""
    return any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _messages(leaves: Sequence[_Leaf]) -> Iterator[list[_Leaf]]:
    message: list[_Leaf] = []
    size = 0
    for each in leaves:
        if message and size + each.nbytes > _MESSAGE_BYTES:
            yield message
            message, size = [], 0
        message.append(each)
        size += each.nbytes
    if message:
        yield message
