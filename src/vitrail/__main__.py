"""`python -m vitrail` is the command `vitrail`."""

import sys

from vitrail.cli import main

if __name__ == "__main__":
    sys.exit(main())
