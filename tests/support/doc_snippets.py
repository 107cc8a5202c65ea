"""Finds the fenced snippets of a Markdown page. `snippet_check.py` runs or checks each, by its language:

    python   executed on two ranks
    diff     its old and its new version, both as python; they must differ
    yaml     with `trainer:` parsed by LightningCLI, which must end up with a CommHookDDP; else read by CommHookKwargs
    bash     every command must exist, with its files, targets, extras and flags
    text     not looked at

A fence that needs more than `import torch` names what it needs in a comment above it, which no page shows:

    <!-- snippet: ddp -->         `model`, `optimizer` and `batches`, in a process group
    <!-- snippet: attached -->    the same, and `ddp_model` with its `hook`, three steps old
    <!-- snippet: accelerate -->  as for `ddp`, and `train_loader`; in processes as `accelerate launch` starts them
    <!-- snippet: accelerate yaml --> the same with settings from outside, as from a YAML file
    <!-- snippet: accelerate sharded --> the same on four ranks, where FSDP2 of Accelerate works
    <!-- snippet: transformers --> `model`, `args` and `train_dataset` for a Trainer; in processes of torchrun
    <!-- snippet: transformers sharded --> `model`, `train_dataset` and `TrainingArguments`, on such four ranks
    <!-- snippet: continued -->   whatever the snippet above it left
    <!-- snippet: lightning -->   `model` and `train_loader`; the snippet is a script of its own, started from a shell
                                  (of a diff the new version; the old one as below)
    <!-- snippet: lightning ranks --> the same in processes as torchrun starts them, which is much faster
    <!-- snippet: fabric ranks --> the same with Fabric
    <!-- snippet: lightning notebook --> a script as above that forks, so that nothing of its training is left in it

    <!-- snippet: output -->      of the script above: each line of this `text` must be in what its first run prints

A script with `ckpt_path="last"` is started twice: the second run must continue where the first has ended.
"""

import dataclasses
import re
import textwrap
from dataclasses import dataclass

LANGUAGES = ("python", "diff", "yaml", "bash", "text")
RUN_AS_SCRIPTS = ("lightning", "lightning notebook")
_LIGHTNING_NEEDS = ("lightning", "lightning ranks", "lightning notebook")
_ACCELERATE_NEEDS = ("accelerate", "accelerate yaml", "accelerate sharded")
_OTHER_NEEDS = ("transformers", "transformers sharded", "continued", "output", "fabric ranks")
NEEDS = ("", "ddp", "attached", *_ACCELERATE_NEEDS, *_OTHER_NEEDS, *_LIGHTNING_NEEDS)

_COMMENT = re.compile(r"^\s*<!-- snippet: (.*?) -->\s*$")
_FENCE = re.compile(r"^(\s*)(```+|~~~+)\s*(\S*)")


class WrongSnippet(AssertionError):
    """A snippet does not do what its reader will expect; the text says where it is and why."""


@dataclass(frozen=True)
class Snippet:
    page: str
    line: int
    language: str
    needs: str
    text: str
    above: "Snippet | None" = None
    """The snippet that this one continues."""
    output: str = ""
    """Lines that a script must print."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def find_snippets(page: str, markdown: str) -> list[Snippet]:
    """All fences of a page. Raises `WrongSnippet` for one without a known language."""
    snippets: list[Snippet] = []
    lines = markdown.splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        end = number + 1
        while end < len(lines) and lines[end].strip() != opening[2]:
            end += 1
        comment = _COMMENT.match(lines[number - 1]) if number else None
        needs = comment[1] if comment else ""
        where = f"{page}:{number + 1}"
        if end == len(lines):
            raise WrongSnippet(f"{where}: the fence is never closed")
        if opening[3] not in LANGUAGES:
            raise WrongSnippet(f"{where}: language {opening[3]!r}; expected one of {', '.join(LANGUAGES)}")
        if needs not in NEEDS:
            raise WrongSnippet(f"{where}: unknown comment 'snippet: {needs}'")
        text = textwrap.dedent("\n".join(lines[number + 1 : end])) + "\n"
        if needs == "output":
            if not snippets or snippets[-1].needs not in RUN_AS_SCRIPTS:
                raise WrongSnippet(f"{where}: the output of what? Above it must be a script")
            snippets[-1] = dataclasses.replace(snippets[-1], output=text)
        above = snippets[-1] if needs == "continued" and snippets else None
        snippets.append(Snippet(page, number + 1, opening[3], needs, text, above))
        number = end + 1
    return snippets


def old_and_new(diff: str) -> tuple[str, str]:
    """The two versions of a text that a diff without headers shows."""
    old, new = [], []
    for line in diff.splitlines():
        if line[:1] not in ("-", "+", " ", ""):
            raise WrongSnippet(f"a line of a diff begins with '+', '-' or a space, this one does not: {line!r}")
        if line[:1] != "+":
            old.append(line[1:])
        if line[:1] != "-":
            new.append(line[1:])
    if old == new:
        raise WrongSnippet("the diff changes nothing")
    return "\n".join(old) + "\n", "\n".join(new) + "\n"


def versions(snippet: Snippet) -> tuple[str, ...]:
    return old_and_new(snippet.text) if snippet.language == "diff" else (snippet.text,)
