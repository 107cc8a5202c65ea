"""Write the section `comm_hook_config` into a file without changing the rest of it, including comments."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml

from accelerate_commhooks.yaml_config import SECTION
from commhooks import HookConfigError


def write_section(path: Path, settings: dict[str, Any]) -> None:
    """Write `settings` as the section of the file and replace an existing section. The file is created if missing.

    Raises:
        HookConfigError: the file does not hold settings. It is not changed.
    """
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        root = yaml.compose(before, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise HookConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise HookConfigError(f"{path} does not hold settings ('key: value')")
    if root is not None and root.flow_style:  # JSON or flow-style YAML: there are no comments to keep
        content = yaml.safe_load(before) | {SECTION: settings}
        after = json.dumps(content, indent=2) + "\n"
    else:
        after = _without_section(before, root)
        after += "" if not after or after.endswith("\n") else "\n"
        after += yaml.safe_dump({SECTION: settings}, sort_keys=False)
    _replace(path, after)


def _without_section(text: str, root: "yaml.MappingNode | None") -> str:
    for key, value in root.value if root is not None else ():
        if key.value == SECTION:
            lines = text.splitlines(keepends=True)
            end = value.end_mark.line + (value.end_mark.column > 0)
            # The parser ends a block before the next token. Blank lines and comments before that token belong to the
            # token, unless they are indented as the block is.
            while end > key.start_mark.line + 1 and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
                end -= 1
            return "".join(lines[: key.start_mark.line] + lines[end:])
    return text


def _replace(path: Path, text: str) -> None:
    path = path.resolve()  # replace the target of a link, not the link
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        if path.exists():
            shutil.copymode(path, temporary)
        else:
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
