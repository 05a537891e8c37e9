"""Lets `python -m extproc` do what the command `extproc` does."""

import sys

from extproc.cli import main

if __name__ == "__main__":
    sys.exit(main())
