"""Tell a checkpoint file that ends too early from one that was never meant to be read."""

import re
import zipfile
from pathlib import Path


def cut_off(path: str | Path, error: Exception) -> str:
    """That a file cannot be read because its end is missing, where `torch.load` has failed with `error`; "" if nothing
    is missing, or if the file is not on this machine."""
    try:
        size = Path(path).stat().st_size
        with open(path, "rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
    except OSError:
        return ""
    if size == 0:
        return "cannot be read: it is empty: what wrote it was interrupted"
    # In torch's older format the pickle itself ends early (torch 2.13, Python 3.10 to 3.14).
    early = isinstance(error, EOFError) or re.search("unexpected EOF|data was truncated|Ran out of input", str(error))
    if early or (is_zip and not zipfile.is_zipfile(path)):
        return f"cannot be read: it is cut off after {size} bytes: what wrote or copied it was interrupted"
    return ""
