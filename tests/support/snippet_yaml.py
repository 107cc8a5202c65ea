"""Checks YAML snippets: settings of Lightning or of Accelerate."""

import re
import sys
from pathlib import Path
from unittest import mock

from tests.support.doc_snippets import WrongSnippet


def check_yaml(text: str, folder: Path) -> None:
    if re.search("^trainer:", text, re.MULTILINE):
        _check_lightning_yaml(text, folder)
    else:
        _check_accelerate_yaml(text, folder)


def _check_accelerate_yaml(text: str, folder: Path) -> None:
    """Settings for `CommHookKwargs`; where they are a section, the rest must be a configuration of Accelerate."""
    import yaml
    from accelerate.commands.config.config_args import load_config_from_file

    from accelerate_commhooks.settings import SECTION, Settings
    from commhooks import HookConfigError

    path = folder / "config.yaml"
    path.write_text(text)
    try:
        Settings.read(path).check(imports=False)
    except HookConfigError as error:
        raise WrongSnippet(f"{error}\n{text}") from error
    content = yaml.safe_load(text)
    if content.pop(SECTION, None) is not None:
        path.write_text(yaml.safe_dump(content))
        try:
            load_config_from_file(str(path))
        except ValueError as error:
            raise WrongSnippet(f"Accelerate refuses\n{text}\n{error}") from error


def _check_lightning_yaml(text: str, folder: Path) -> None:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    from lightning_commhooks import CommHookDDP

    path = folder / "config.yaml"
    path.write_text(text)
    command_line = ["main.py", "--config", str(path), "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
    try:
        with mock.patch.object(sys, "argv", command_line):
            cli = LightningCLI(BoringModel, run=False, save_config_callback=None, seed_everything_default=False)
    except SystemExit as error:  # jsonargparse has written to stderr what it does not like
        raise WrongSnippet(f"LightningCLI refuses\n{text}") from error
    if not isinstance(cli.trainer.strategy, CommHookDDP):
        raise WrongSnippet(f"the strategy is a {type(cli.trainer.strategy).__name__}, not a CommHookDDP, with\n{text}")
