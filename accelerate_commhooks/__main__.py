"""`python -m accelerate_commhooks` is the `accelerate-commhooks` command."""

import sys

from accelerate_commhooks.cli import main

if __name__ == "__main__":
    sys.exit(main())
