"""Snippets of the documentation work, links lead somewhere, and quoted errors exist."""

import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import types
from pathlib import Path
from typing import Any

import pytest
from snippets import Snippet, WrongSnippet, check, find_snippets

import commhooks
from commhooks.auto import options as candidates
from commhooks.hook import statistics
from tests.support.features import trainer_resumes_on_cpu
from tests.support.repository import PACKAGES, REPOSITORY, nodes
from tests.support.workers import RanksFailed

DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
PAGES = {
    page: page.read_text(encoding="utf-8")
    for page in (REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *DOCS)
}
SNIPPETS = [
    snippet
    for page, text in PAGES.items()
    for snippet in find_snippets(page.relative_to(REPOSITORY).as_posix(), text)
]
CONTINUED = {snippet.above for snippet in SNIPPETS}
"""They run with the snippet that continues them."""
COMMAND = r"(?<!`)`((?:make|pip|python|torchrun|commhooks|accelerate-commhooks) [^`]+)`"
INLINE_COMMANDS = [
    (page.name, code) for page, text in PAGES.items() for code in re.findall(COMMAND, text)
]


def _marked(snippet: Snippet) -> Any:
    marks = [trainer_resumes_on_cpu] if "resume_from_checkpoint" in snippet.text else []
    return pytest.param(snippet, marks=marks, id=str(snippet))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "snippet", [_marked(snippet) for snippet in SNIPPETS if snippet not in CONTINUED]
)
def test_each_snippet_runs(snippet, run_ranks, tmp_path):
    check(snippet, run_ranks, tmp_path)


@pytest.mark.parametrize(("page", "code"), INLINE_COMMANDS)
def test_each_command_in_the_text_runs(page, code, run_ranks, tmp_path):
    check(Snippet(page, 0, "bash", "", code), run_ranks, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_long_commands_stand_alone(page):
    """To be copied from a fence, not read in the middle of a sentence."""
    sentences = re.sub(r"^\|.*$", "", _without_code(PAGES[page]), flags=re.MULTILINE)
    commands = re.findall(
        r"(?<!`)`((?:sudo |make |pip |python |torchrun |commhooks |accelerate)[^`]+)`", sentences
    )
    assert [command for command in commands if len(command) > 60] == []


def _definitions(markdown: str) -> dict[str, str]:
    """The names that stand for links: `[here][name]` and below `[name]: page.md#heading`."""
    return dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", markdown, re.MULTILINE))


def _targets(markdown: str) -> list[str]:
    return [*re.findall(r"\]\(([^)]+)\)", markdown), *_definitions(markdown).values()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in _targets(PAGES[page]):
        file = target.partition("#")[0]
        assert "://" in target or (page.parent / file).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_links_are_defined(page):
    used = re.findall(r"\]\[([\w-]+)\]", _without_code(PAGES[page]))
    assert {*used} <= _definitions(PAGES[page]).keys()


def test_the_first_page_of_the_site_defines_the_links_of_readme():
    """It includes README, whose links begin in another folder."""
    readme, first = (
        _definitions(PAGES[REPOSITORY / page]) for page in ("README.md", "docs/index.md")
    )
    assert (
        readme and {name: target.removeprefix("docs/") for name, target in readme.items()} == first
    )
    (included,) = re.findall(
        r'^--8<-- "README.md:(\w+)"$', PAGES[REPOSITORY / "docs/index.md"], re.MULTILINE
    )
    text = (
        PAGES[REPOSITORY / "README.md"]
        .partition(f"[start:{included}]")[2]
        .partition(f"[end:{included}]")[0]
    )
    assert text.count("\n## ") > 3 and "](" not in text, (
        "a link that is not by name leads nowhere in the site"
    )


# ---- pages as a whole ----------------------------------------------------------------------------


def _without_code(markdown: str) -> str:
    return re.sub(r"^\s*(```+|~~~+).*?^\s*\1\s*$", "", markdown, flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> list[str]:
    """As Python-Markdown and GitHub make them of the headings."""
    headings = re.findall(r"^#+ (.+)$", _without_code(PAGES[page]), re.MULTILINE)
    return [
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        for heading in headings
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings(page):
    for target in _targets(PAGES[page]):
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        if anchor and "://" not in target:
            assert anchor in _anchors(there), (
                f"{page.name} links to {target}; there are {_anchors(there)}"
            )


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_pages_link_to_pages_only(page):
    """What is outside of docs/ is not in the site."""
    for link in _targets(_without_code(PAGES[page])):
        target = link.partition("#")[0] or page.name
        figure = re.fullmatch(r"figures/[a-z_]+\.png", target)
        assert (
            "://" in target
            or figure
            or (page.parent / target).suffix == ".md"
            and "/" not in target
        ), target


def _texts_of_the_code() -> list[list[str]]:
    """Each text in the code, as the pieces between what is put into it."""
    texts = []
    for node in itertools.chain(*nodes().values()):
        if isinstance(node, ast.JoinedStr):
            parts = [str(x.value) if isinstance(x, ast.Constant) else "\0" for x in node.values]
            texts.append("".join(parts).split("\0"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(re.split(r"%[srdg]", node.value))
    return texts


def _quotes(markdown: str) -> list[str]:
    """The first column of the tables that begin with "it says", where it is code."""
    tables = re.findall(r"^\| it says \|.*\n\|[-| ]+\n((?:\|.*\n)+)", markdown, re.MULTILINE)
    return [
        quote for table in tables for quote in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    ]


def _is_said(quote: str, texts: list[list[str]]) -> bool:
    """Whether the pieces of `quote` between "..." are in one text, in this order."""
    wanted = [piece.strip() for piece in quote.split("...") if piece.strip()]

    def found(text: list[str]) -> bool:
        rest = "\0".join(text)
        for piece in wanted:
            before, there, rest = rest.partition(piece)
            if not there:
                return False
        return True

    return any(found(text) for text in texts)


def test_quoted_errors_are_those_of_the_code():
    texts = _texts_of_the_code()
    quotes = [quote for text in PAGES.values() for quote in _quotes(text)]
    assert quotes
    assert [quote for quote in quotes if not _is_said(quote, texts)] == []
    assert not _is_said("the ranks attach different hats:", texts)
    assert not _is_said("the replicas have drifted apart ... rank 0 alone", texts)


def _page(name: str) -> str:
    return PAGES[REPOSITORY / f"docs/{name}.md"]


def test_the_counters_are_explained():
    rows = re.findall(r"^\| (`.+?) \|", _page("working"), re.MULTILINE)
    explained = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    counted = set(re.findall(r'^ +"(\w+)"[:,]', inspect.getsource(statistics), re.MULTILINE))
    assert counted and counted <= explained


def test_the_threshold_of_auto_is_the_one_on_the_page():
    much = f"{100 * (candidates.MARGIN - 1):.0f} %"
    assert f"within {much} of the fastest and gain at least {much}" in _page("choosing")


@pytest.mark.parametrize(
    "kind",
    [commhooks.ParameterInfo, commhooks.UnitPlan, commhooks.Send, commhooks.StepInfo],
    ids=lambda kind: kind.__name__,
)
def test_the_fields_are_explained(kind):
    (rows,) = re.findall(
        rf"^\| `{kind.__name__}` \| \|\n\|---\|---\|\n((?:\|.+\n)+)",
        _page("own_hook"),
        re.MULTILINE,
    )
    explained = re.findall(r"`(\w+)`", " ".join(row.split(" | ")[0] for row in rows.splitlines()))
    fields = [field.name for field in dataclasses.fields(kind)]
    assert sorted(explained) == sorted(fields)


def test_the_reference_has_every_public_name():
    page = _page("reference")
    for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE):
        module, _, name = path.rpartition(".")
        if module.endswith(".transformers"):
            pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")
        public = getattr(importlib.import_module(module), name)
        # A type alias has its docstring in the source only, below it.
        assert isinstance(public, types.GenericAlias) or (public.__doc__ or "").strip(), (
            f"{path} has no docstring"
        )
    for package in PACKAGES:
        for name in importlib.import_module(package).__all__:
            assert name == "ddp_comm_hooks" or f"\n::: {package}.{name}\n" in page, (
                f"{package}.{name}"
            )


def test_the_pages_show_each_kind():
    """An empty list of snippets would pass too."""
    kinds = {
        page: set() for page in ("README.md", "docs/index.md", "docs/ddp.md", "docs/migrating.md")
    }
    for snippet in SNIPPETS:
        kinds.setdefault(snippet.page, set()).add((snippet.language, snippet.needs))
    fronts = ("lightning ranks", "accelerate", "transformers", "ddp")
    assert {("bash", ""), *(("diff", needs) for needs in fronts)} <= kinds["README.md"]
    assert {("python", "lightning"), ("text", "output")} <= kinds["docs/index.md"]
    assert {("python", "attached"), ("python", "continued")} <= kinds["docs/ddp.md"]
    assert ("yaml", "") in kinds["docs/lightning.md"]
    assert {("diff", "lightning ranks"), ("diff", "accelerate"), ("diff", "ddp")} <= kinds[
        "docs/migrating.md"
    ]
    assert ("README.md", "commhooks hooks") in INLINE_COMMANDS


# ---- a wrong snippet is found --------------------------------------------------------------------


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("markdown", "text"),
    [
        (
            "<!-- snippet: alone -->\n```python\nimport commhooks\ncommhooks.no_such_name\n```",
            "has no attribute 'no_such_name'",
        ),
        ("<!-- snippet: alone -->\n```python\ntorch\n```", "name 'torch' is not defined"),
        (
            (
                "<!-- snippet: torchrun -->\n```python\nimport"
                " torch\ntorch.distributed.get_world_size()\n```"
            ),
            "Default process group has not been initialized",
        ),
        (
            (
                "<!-- snippet: attached -->\n```python\nif dist.get_rank():"
                " model[0].bias.data.add_(1)\n```"
            ),
            "replicas differ",
        ),
        (
            (
                "<!-- snippet: lightning -->\n```python\nfrom lightning.pytorch import Trainer\n"
                "Trainer(strategy='ddp_power')\n```"
            ),
            "ddp_power",
        ),
        (
            (
                "<!-- snippet: lightning notebook -->\n```python\nprint('one')\n```\n"
                "<!-- snippet: output -->\n```text\none\ntwo\n```"
            ),
            "does not print 'two'",
        ),
        (
            (
                "```yaml\ntrainer:\n  strategy:\n    class_path:"
                " lightning_commhooks.NoSuchStrategy\n```"
            ),
            "NoSuchStrategy",
        ),
        ("```yaml\nhook: powerSDG\n```", "did you mean 'powerSGD'"),
        ("```bash\nmake dmeo\n```", "no such target"),
        (
            "```bash\npython examples/lightning_digits.py --hooks powerSGD\n```",
            "does not take these arguments",
        ),
        ("```bash\ncommhooks hoks\n```", "exits with status 2"),
        ("```bash\nconda install torch\n```", "does not know 'conda'"),
    ],
)
def test_a_wrong_snippet_is_noticed(markdown, text, run_ranks, tmp_path):
    with pytest.raises((WrongSnippet, RanksFailed, ValueError)) as raised:
        check(find_snippets("page.md", markdown)[0], run_ranks, tmp_path)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("markdown", "text"),
    [
        ("```pythn\nx\n```", "language 'pythn'"),
        ("```python\nx\n", "never closed"),
        ("```python\nx\n```", "no comment says what is there when it runs"),
        (
            "A list:\n\n- x\n\n    more of it\n\nAn end:\n\n    x = 1\n",
            "page.md:9: code without a fence",
        ),
        ("<!-- snippet: dpd -->\n```python\nx\n```", "unknown comment"),
    ],
)
def test_a_wrong_fence_is_noticed(markdown, text):
    with pytest.raises(WrongSnippet, match=text):
        find_snippets("page.md", markdown)
