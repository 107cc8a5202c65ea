"""Find payloads in a file or folder, check them and describe them as plain types. No code in the files is executed."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from commhooks.checkpoint import parts as payload_parts
from commhooks.checkpoint.checks import (
    REPLICAS_EQUAL,
    bucket_keys,
    check_header,
    check_learned,
    check_range,
    check_world_size,
    factor_keys,
    shown,
)
from commhooks.errors import PayloadError
from commhooks.tools.named_model import UnreadableFileError, load_plain

_DEPTH = 6
_PLACES = 10_000
"""Largest number of dicts that are searched: a malicious checkpoint can be endless."""
_SHARED = re.compile(r"comm_hook(_[1-9]\d*)?\.pt")


def inspect_path(path: Path) -> list[dict[str, Any]]:
    """Report on each payload in `path`: a checkpoint file, or a folder of Accelerate or the Trainer.

    Returns:
        Plain types. "where" is the file and the keys that lead to the payload, "problems" a list of sentences about its
        defects. The other keys are those of docs/checkpoint_format.md; they are missing if the payload is damaged.

    Raises:
        UnreadableFileError: no file could be read, or there is no payload.
    """
    if not path.is_dir():
        return _inspect_file(path)
    shared = sorted((each for each in path.iterdir() if _SHARED.fullmatch(each.name)), key=lambda p: (len(p.name), p))
    reports = [report for each in shared for report in _inspect_file(each)]
    known = {each.name for each in shared}
    for part in sorted(path.glob("comm_hook*_rank*.pt")):
        if (name := _shared_of(part)) not in known:
            known.add(name)
            text = f"{name} is missing, which the main process writes, though {part.name} is there"
            reports.append({"where": str(path), "problems": [text]})
    if not reports:
        folders = {str(each.parent) for each in path.glob("*/comm_hook*.pt")}
        inside = sorted(folders | {str(each) for each in path.glob("*.ckpt")})
        hint = f"; give one of {', '.join(inside[:5])}" if inside else ""
        raise UnreadableFileError(f"{path} has no comm_hook*.pt, as folders of Accelerate and the Trainer have{hint}")
    return reports


def _inspect_file(path: Path) -> list[dict[str, Any]]:
    content = load_plain(path)
    if isinstance(content, dict) and content.get("format") == payload_parts.PART_FORMAT:
        return [_inspect_part_alone(path, content)]
    found = list(_find(content))
    if not found:
        keys = f", only {', '.join(map(shown, list(content)[:8]))}" if isinstance(content, dict) else ""
        raise UnreadableFileError(f"{path} holds no state of a communication hook{keys}")
    return [_inspect(path, keys, payload) for keys, payload in found]


def _find(content: Any) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the payloads with the keys that lead to them; the least nested first."""
    left: list[tuple[tuple[str, ...], Any]] = [((), content)]
    seen: set[int] = set()
    while left and len(seen) < _PLACES:
        keys, value = left.pop(0)
        if not isinstance(value, dict) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value.get("format"), str) and value["format"] == "commhooks":
            yield keys, value
        elif len(keys) < _DEPTH:
            left += [((*keys, _text(key)), each) for key, each in value.items()]


def _inspect(path: Path, keys: tuple[str, ...], payload: dict[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = {"where": str(path) + "".join(f"[{shown(key)}]" for key in keys), "problems": []}
    try:
        header = check_header(payload)
        parts: dict[int, dict[str, Any]] = {}
        if "fingerprint" in header:
            header = payload_parts.check_shared(header)
            parts = _read_parts(path, header, report)
        elif "parameters" in header:
            check_learned(header)
        else:
            check_world_size(header)
        if "parameters" in header:
            _check_ranges(header)
    except PayloadError as error:
        report["problems"].append(str(error))
        return report
    counted = ("step", "nonfinite_steps", "world_size")
    copied = ("version", "hook", "options", *counted, "loss_scale", "exact", "residual", REPLICAS_EQUAL)
    report |= {key: header[key] for key in copied if key in header}
    report["options"] = {_text(key): _plain_value(value) for key, value in header["options"].items()}
    if type(header.get("notes")) is dict:
        report["notes"] = _plain_notes(header["notes"])
    states = [header.get("hook_state"), *(part["hook_state"] for part in parts.values())]
    report["hook_state"] = next((_described(state) for state in states if state is not None), None)
    if "parameters" in header:
        report["residual_ranks"] = sorted(parts) if "fingerprint" in header else header["residual_ranks"]
        scale = float(header["loss_scale"])
        report["parameters"] = [
            _entry(name, entry, report["residual_ranks"], parts, scale) for name, entry in header["parameters"].items()
        ]
        report["batched_q"] = [
            {"name": name, "shape": list(each.shape), "size_bytes": each.nbytes}
            for key in ("batched_q", *bucket_keys(header))
            for name, each in header[key].items()
        ]
        report["size_bytes"] = sum(each["size_bytes"] for each in report["parameters"] + report["batched_q"])
    return report


def _check_ranges(header: dict[str, Any]) -> None:
    for name, entry in header["parameters"].items():
        tensors = [entry["q"], entry.get("p"), *_residuals(entry)]
        wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
        check_range(name, entry, torch.float64 if wide else torch.float32, float(header["loss_scale"]))


def _read_parts(path: Path, shared: dict[str, Any], report: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Read the parts of the ranks that belong to a shared file. Unusable ones are added to the problems."""
    parts: dict[int, dict[str, Any]] = {}
    stem = path.name.removesuffix(".pt")
    for file in sorted(path.parent.glob(f"{stem}_rank*.pt")):
        number = file.stem.removeprefix(f"{stem}_rank")
        if not number.isdecimal():
            continue
        try:
            part = load_plain(file)
        except UnreadableFileError as error:
            report["problems"].append(str(error))
            continue
        problem = payload_parts.problem_of_part(shared, part, int(number))
        if problem is not None:
            report["problems"].append(f"{file} {problem}: it counts as missing")
        else:
            parts[int(number)] = part
    entries, users = shared.get("parameters", {}).values(), shared.get("hook_state") is not None
    missing = [rank for rank in range(shared["world_size"]) if rank not in parts]
    if missing and (users or any(isinstance(entry["residual"], list) for entry in entries)):
        lost = f"no usable part of rank {', '.join(map(str, missing[:16]))}{' ...' if len(missing) > 16 else ''}"
        then = ": a run that resumes from it starts from residuals of zero"
        then = ", which gets the state of the main process" if users else then
        report["problems"].append(f"{path.parent} has {lost}{then}")
    return parts


def _inspect_part_alone(path: Path, part: dict[str, Any]) -> dict[str, Any]:
    """Report on a rank's file that the user named itself; residuals are checked only together with the shared file."""
    shared = path.with_name(_shared_of(path))
    rank = shown(part.get("rank"))
    if shared == path or not shared.exists():
        return {"where": str(path), "problems": [f"the part of rank {rank} alone: the shared file is not beside it"]}
    raise UnreadableFileError(f"{path} is the part of rank {rank}; give the shared file {shared}, or the folder")


def _entry(
    name: str, entry: dict[str, Any], ranks: list[int], parts: dict[int, dict[str, Any]], loss_scale: float
) -> dict[str, Any]:
    """The report on one parameter. Norms are in units of the unscaled loss."""
    q, p = entry["q"], entry.get("p")
    residuals = _residuals(entry)
    if parts:
        residuals = [part["residuals"][name] for _, part in sorted(parts.items()) if name in part["residuals"]]
        ranks = [rank for rank, part in sorted(parts.items()) if name in part["residuals"]]
    norms = [float(torch.linalg.vector_norm(each.detach(), dtype=torch.float64)) / loss_scale for each in residuals]
    per_rank = isinstance(entry["residual"], list)
    return {
        "name": name,
        "shape": entry["shape"],
        "row_dim": entry["row_dim"],
        "rank": next((factor.shape[0] for factor in (q, p) if factor is not None), None),
        "q": None if q is None else list(q.shape),
        "p": None if p is None else list(p.shape),
        # Tensors of other compressors: their shapes by key.
        **{key: list(entry[key].shape) for key in factor_keys(entry) if key not in ("q", "p")},
        "residual_norm": None if not norms or per_rank else norms[0],
        "residual_norm_per_rank": dict(zip(map(str, ranks), norms, strict=True)) if norms and per_rank else None,
        "size_bytes": sum(each.nbytes for each in (*(entry[key] for key in factor_keys(entry)), *residuals)),
    }


def _residuals(entry: dict[str, Any]) -> list[torch.Tensor]:
    residual = entry["residual"]
    return residual if isinstance(residual, list) else [] if residual is None else [residual]


def _text(key: object) -> str:
    return key if isinstance(key, str) else shown(key)


def _plain_value(value: Any) -> Any:
    """An option value as a JSON type; as text if JSON has no such type."""
    if type(value) is list and all(type(item) is str for item in value):
        return value
    if type(value) is dict and all(type(key) is str and type(item) is int for key, item in value.items()):
        return value
    finite = type(value) is float and math.isfinite(value)
    small = type(value) is int and abs(value) <= 2**62
    return value if value is None or type(value) in (str, bool) or finite or small else shown(value)


def _plain_notes(value: Any, depth: int = 0) -> Any:
    """What a compressor has noted, as JSON types."""
    if depth < _DEPTH and type(value) is dict:
        return {_text(key): _plain_notes(each, depth + 1) for key, each in value.items()}
    if depth < _DEPTH and type(value) is list:
        return [_plain_notes(each, depth + 1) for each in value]
    return _plain_value(value)


def _described(state: Any) -> str:
    count = f" with {len(state)} entries" if isinstance(state, (dict, list, tuple)) else ""
    return f"a {type(state).__name__}{count}"


def _shared_of(part: Path) -> str:
    return re.sub(r"_rank\d+\.pt$", ".pt", part.name)
