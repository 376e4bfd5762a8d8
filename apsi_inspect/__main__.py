"""``python -m apsi_inspect``: the same as `apsi`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
