"""`python -m commhooks` runs the `commhooks` command."""

import sys

from commhooks.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
