"""The `accelerate-commhooks` command, also `python -m accelerate_commhooks`."""

import argparse
import sys

from accelerate_commhooks import check_accelerate
from commhooks import __version__
from commhooks.errors import HookConfigError


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and return its status: 2 for an invalid request, 1 without Accelerate."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="accelerate-commhooks",
        description="Communication hooks for Accelerate, set in its configuration file.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"commhooks {__version__}")
    parser.add_argument(
        "command",
        choices=["launch"],
        help=(
            "start a script as `accelerate launch` does, with the hook that the configuration file"
            " asks for"
        ),
    )
    parser.parse_args(arguments[:1])  # the others are for Accelerate's launcher and the script
    try:
        check_accelerate()
    except ImportError as error:
        print(f"accelerate-commhooks: {error}", file=sys.stderr)
        return 1
    from accelerate_commhooks.launch import launch

    try:
        return launch(arguments[1:])
    except HookConfigError as error:
        print(f"accelerate-commhooks launch: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
