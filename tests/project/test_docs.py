"""Every snippet of README, CONTRIBUTING and docs/ works, every link leads somewhere, and every quoted error exists."""

import ast
import dataclasses
import importlib
import inspect
import re
import types
from pathlib import Path
from typing import Any

import pytest

import commhooks
from commhooks.compressors import candidates
from tests.support.doc_snippets import Snippet, WrongSnippet, find_snippets, old_and_new
from tests.support.features import replicate_with_fsdp, trainer_resumes_on_cpu
from tests.support.repository import PACKAGES, REPOSITORY, sources
from tests.support.snippet_check import check
from tests.support.snippet_commands import commands
from tests.support.workers import RanksFailed

DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
PAGES = {
    page: page.read_text(encoding="utf-8") for page in (REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *DOCS)
}
SNIPPETS = [
    snippet for page, text in PAGES.items() for snippet in find_snippets(page.relative_to(REPOSITORY).as_posix(), text)
]
COMMAND = r"(?<!`)`((?:make|pip|python|torchrun|commhooks|accelerate-commhooks) [^`]+)`"
INLINE_COMMANDS = [(page.name, code) for page, text in PAGES.items() for code in re.findall(COMMAND, text)]


def _marked(snippet: Snippet) -> Any:
    marks = [trainer_resumes_on_cpu] if "resume_from_checkpoint" in snippet.text else []
    marks += [replicate_with_fsdp] if "replicate_with_fsdp" in snippet.text else []
    return pytest.param(snippet, marks=marks, id=str(snippet))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("snippet", [_marked(snippet) for snippet in SNIPPETS])
def test_snippet(snippet, run_ranks, tmp_path):
    check(snippet, run_ranks, tmp_path)


@pytest.mark.parametrize(("page", "code"), INLINE_COMMANDS)
def test_command_in_the_text(page, code, run_ranks, tmp_path):
    check(Snippet(page, 0, "bash", "", code), run_ranks, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGES[page]):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


# ------------------------------------------------------------------------------------------------- pages as a whole


def _without_code(markdown: str) -> str:
    return re.sub(r"^\s*(```+|~~~+).*?^\s*\1\s*$", "", markdown, flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> list[str]:
    """As Python-Markdown and GitHub make them of the headings."""
    headings = re.findall(r"^#+ (.+)$", _without_code(PAGES[page]), re.MULTILINE)
    return [re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", PAGES[page]):
        there = page.parent / target if target else page
        assert anchor in _anchors(there), f"{page.name} links to {target}#{anchor}; there are {_anchors(there)}"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_pages_link_to_pages_only(page):
    """What is outside of docs/ is not in the site."""
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", _without_code(PAGES[page])):
        figure = re.fullmatch(r"figures/[a-z_]+\.png", target)
        assert "://" in target or figure or (page.parent / target).suffix == ".md" and "/" not in target, target


def _texts_of_the_code() -> list[list[str]]:
    """Each text in the code, as the pieces between what is put into it."""
    texts = []
    for source in sources().values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr):
                parts = [str(x.value) if isinstance(x, ast.Constant) else "\0" for x in node.values]
                texts.append("".join(parts).split("\0"))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.split(r"%[srdg]", node.value))
    return texts


def _quotes(markdown: str) -> list[str]:
    """The first column of the tables that begin with "it says", where it is code."""
    tables = re.findall(r"^\| it says \|.*\n\|[-| ]+\n((?:\|.*\n)+)", markdown, re.MULTILINE)
    return [quote for table in tables for quote in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)]


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
    rows = re.findall(r"^\| (`.+?) \|", _page("metrics"), re.MULTILINE)
    explained = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    counted = set(re.findall(r'^ +"(\w+)": ', inspect.getsource(commhooks.CommHook.stats), re.MULTILINE))
    assert counted and counted <= explained


def test_the_doctors_threshold_is_the_one_on_the_page():
    """And of auto."""
    much = f"{100 * (candidates.MARGIN - 1):.0f} %"
    doctor, auto = _page("commands"), _page("auto")
    assert f"step at least {much} faster" in doctor
    assert f"within {much} of the fastest and gain at least {much}" in auto


@pytest.mark.parametrize(
    "kind",
    [commhooks.ParameterInfo, commhooks.UnitPlan, commhooks.Send, commhooks.StepInfo],
    ids=lambda kind: kind.__name__,
)
def test_the_fields_are_explained(kind):
    (rows,) = re.findall(rf"^\| `{kind.__name__}` \| \|\n\|---\|---\|\n((?:\|.+\n)+)", _page("own_hook"), re.MULTILINE)
    explained = re.findall(r"`(\w+)`", " ".join(row.split(" | ")[0] for row in rows.splitlines()))
    fields = [field.name for field in dataclasses.fields(kind)]
    assert sorted(explained) == sorted(fields)


def test_the_reference_has_every_public_name():
    page = _page("reference")
    for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE):
        module, _, name = path.rpartition(".")
        if module.endswith(".transformers"):
            pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")
        found = getattr(importlib.import_module(module), name)
        # A type alias has its docstring in the source only, below it.
        assert isinstance(found, types.GenericAlias) or (found.__doc__ or "").strip(), f"{path} has no docstring"
    for package in PACKAGES:
        for name in importlib.import_module(package).__all__:
            assert name == "ddp_comm_hooks" or f"\n::: {package}.{name}\n" in page, f"{package}.{name}"


def test_the_pages_show_each_kind():
    """An empty list of snippets would pass too."""
    kinds = {page: set() for page in ("README.md", "docs/quickstart.md", "docs/migrating.md")}
    for snippet in SNIPPETS:
        kinds.setdefault(snippet.page, set()).add((snippet.language, snippet.needs))
    assert {
        ("bash", ""),
        ("python", "lightning"),
        ("text", "output"),
        ("python", "accelerate"),
        ("python", "ddp"),
        ("python", "continued"),
    } <= kinds["README.md"]
    assert ("yaml", "") in kinds["docs/lightning.md"] and ("python", "transformers") in kinds["docs/quickstart.md"]
    assert {("diff", "lightning ranks"), ("diff", "accelerate"), ("diff", "ddp")} <= kinds["docs/migrating.md"]
    assert ("README.md", "commhooks hooks") in INLINE_COMMANDS


# ---------------------------------------------------------------------------------------- a wrong snippet is found


def _only(markdown: str) -> Snippet:
    return find_snippets("page.md", markdown)[-1]


@pytest.mark.parametrize(
    ("markdown", "text"),
    [
        ("```python\nimport commhooks\ncommhooks.no_such_name\n```", "has no attribute 'no_such_name'"),
        ("```python\nif True\n```", "SyntaxError"),
        (
            "<!-- snippet: ddp -->\n```python\nimport commhooks\ncommhooks.attach(model, 'powerSGD')\n```",
            "wrap the model first",
        ),
        (
            "<!-- snippet: ddp -->\n```diff\n+import commhooks\n"
            " ddp_model = torch.nn.parallel.DistributedDataParallel(model)\n+commhooks.attach(ddp_model, 'power')\n```",
            "unknown hook 'power'",
        ),
        (
            "<!-- snippet: ddp -->\n```diff\n-import torch.no_such_module\n+import torch\n```",
            "No module named 'torch.no_such_module'",
        ),
        (
            "<!-- snippet: attached -->\n```python\nx = hook.stats()['step']\n```\n"
            "<!-- snippet: continued -->\n```python\nassert x == 4\n```",
            'File "page.md:6", line 1, in <module>\n    assert x == 4',
        ),
        (
            "<!-- snippet: attached -->\n```python\nif dist.get_rank(): model[0].bias.data.add_(1)\n```",
            "replicas differ",
        ),
    ],
)
def test_wrong_python_is_found(markdown, text, run_ranks, tmp_path):
    with pytest.raises(RanksFailed) as raised:
        check(_only(markdown), run_ranks, tmp_path)
    assert text in str(raised.value)


@pytest.mark.timeout(200)
def test_wrong_lightning_script_is_found(run_ranks, tmp_path):
    code = "from lightning.pytorch import Trainer\ntrainer = Trainer(devices=1, max_epochs=1, strategy='ddp_power')\n"
    with pytest.raises(WrongSnippet, match="ddp_power"):
        check(_only(f"<!-- snippet: lightning -->\n```python\n{code}```"), run_ranks, tmp_path)


@pytest.mark.timeout(200)
def test_a_script_that_does_not_continue_is_found(run_ranks, tmp_path):
    code = (
        "from lightning.pytorch import Trainer\nimport lightning_commhooks\n"
        "trainer = Trainer(devices=1, max_epochs=1, strategy='ddp_powersgd', logger=False)\n"
        'trainer.fit(model, train_loader, ckpt_path="last")\n'
    )
    with pytest.raises(WrongSnippet, match="the second run does not continue"):
        check(_only(f"<!-- snippet: lightning -->\n```python\n{code}```"), run_ranks, tmp_path)


@pytest.mark.timeout(200)
def test_an_output_that_is_not_printed_is_found(run_ranks, tmp_path):
    script = "<!-- snippet: lightning notebook -->\n```python\nprint('one; torch kernel')\n```\n"
    outputs = find_snippets("page.md", f"{script}<!-- snippet: output -->\n```text\none; native kernel\ntwo\n```")
    assert outputs[0].output == "one; native kernel\ntwo\n"
    with pytest.raises(WrongSnippet, match="does not print 'two'"):
        check(outputs[0], run_ranks, tmp_path)
    with pytest.raises(WrongSnippet, match="the output of what"):
        find_snippets("page.md", "<!-- snippet: output -->\n```text\none\n```")


def test_wrong_trainer_is_found(run_ranks, tmp_path):
    pytest.importorskip("transformers", reason="transformers needs Python 3.11 or newer")
    code = "from transformers import Trainer\ntrainer = Trainer(model, args, train_dataset=train_dataset)\n"
    with pytest.raises(RanksFailed, match="nothing was trained"):
        check(_only(f"<!-- snippet: transformers -->\n```python\n{code}```"), run_ranks, tmp_path)


def _yaml(strategy: str) -> str:
    return f"```yaml\ntrainer:\n  devices: 2\n  strategy:\n    class_path: {strategy}\n```"


@pytest.mark.parametrize(
    "strategy",
    [
        "lightning_commhooks.NoSuchStrategy",
        "lightning_commhooks.CommHookDDP\n    init_args: {hook: powerSGD, hook_options: {rank: 4}}",
        "lightning.pytorch.strategies.DDPStrategy",
    ],
)
def test_wrong_yaml_is_found(strategy, run_ranks, tmp_path):
    with pytest.raises((WrongSnippet, ValueError)):
        check(_only(_yaml(strategy)), run_ranks, tmp_path)


@pytest.mark.parametrize(
    ("yaml", "text"),
    [
        ("hook: powerSDG", "did you mean 'powerSGD'"),
        ("hook: powerSGD\nbucket_cap: 3", "did you mean 'bucket_cap_mb'"),
        ("distributed_type: MULTI_GPU\ncomm_hook_config: {hook: powerSGD, rank: 3}", "has no setting 'rank'"),
        ("distributed_type: MULTI_GPU\nprocesses: 2\ncomm_hook_config: {hook: powerSGD}", "unknown keys"),
        ("distributed_type: MULTI_GPU", "no section"),
        ("devices: 2", "devices"),
    ],
)
def test_wrong_accelerate_yaml_is_found(yaml, text, run_ranks, tmp_path):
    with pytest.raises(WrongSnippet, match=re.escape(text)):
        check(_only(f"```yaml\n{yaml}\n```"), run_ranks, tmp_path)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("make dmeo", "no such target"),
        ("make demo ARG=--epochs=3", "does not use ARG"),
        ("make demo ARGS=--epoch-count=3", "does not take these arguments"),
        ("python examples/lightning_digits.py --hooks powerSGD", "does not take these arguments"),
        ("python examples/nothing.py", "no such file"),
        ("python -m no_such_module", "no such module"),
        ("torchrun --ranks 2 examples/transformers_trainer.py", "torchrun does not take these arguments"),
        ("torchrun --nproc-per-node 2 examples/nothing.py", "no such file"),
        ("torchrun --max-restart", "torchrun does not take --max-restart"),
        ("torchrun -m commhooks doctor examples.doctor_transformer:built", "has no 'built'"),
        ("torchrun -m commhooks doctor examples.doctor_transformer:build --step 3 --nosuch", "cannot be started"),
        ("torchrun -m commhooks hooks", "cannot be started"),
        ("srun torchrun --nnodes 2 examples/nothing.py", "no such file"),
        ("export NCCL_SOCKET_IFNAME=eth1 && make dmeo", "does not know '&&'"),
        ('pip install ".[lightening]"', "no extra 'lightening'"),
        ("pip install commhooks", "only this repository"),
        ("commhooks hoks", "exits with status 2"),
        ("conda install torch", "does not know 'conda'"),
        ("accelerate-commhooks lunch train.py", "the command is launch"),
        ("accelerate-commhooks launch --config_file nothing.yaml examples/accelerate_digits.py", "cannot be read"),
        ("accelerate-commhooks launch --confg_file=x examples/accelerate_digits.py", "no arguments of it"),
        ("accelerate-commhooks launch examples/accelerate_digits.py --epoch-count 3", "does not take these arguments"),
    ],
)
def test_wrong_command_is_found(command, text, run_ranks, tmp_path):
    with pytest.raises(WrongSnippet, match=re.escape(text)):
        check(_only(f"```bash\n{command}\n```"), run_ranks, tmp_path)


@pytest.mark.parametrize(
    ("markdown", "text"),
    [
        ("```\nx\n```", "language ''"),
        ("```pythn\nx\n```", "language 'pythn'"),
        ("```python\nx\n", "never closed"),
        ("<!-- snippet: dpd -->\n```python\nx\n```", "unknown comment"),
    ],
)
def test_wrong_fence_is_found(markdown, text):
    with pytest.raises(WrongSnippet, match=text):
        find_snippets("page.md", markdown)


def test_find_snippets():
    markdown = "a\n\n  ```python\n  if x:\n      y\n  ```\n<!-- snippet: ddp -->\n~~~text\n```\n~~~\n"
    assert [(s.line, s.language, s.needs, s.text) for s in find_snippets("page.md", markdown)] == [
        (3, "python", "", "if x:\n    y\n"),
        (8, "text", "ddp", "```\n"),
    ]


def test_old_and_new():
    assert old_and_new("-a\n+b\n c\n\n") == ("a\nc\n\n", "b\nc\n\n")
    for wrong, text in ((" a\n", "changes nothing"), ("a\n+b\n", "begins with")):
        with pytest.raises(WrongSnippet, match=text):
            old_and_new(wrong)


def test_commands():
    assert commands("$ make demo  # comment\n\n# only a comment\npip install \\\n  '.[cli]'\n") == [
        ["make", "demo"],
        ["pip", "install", ".[cli]"],
    ]
