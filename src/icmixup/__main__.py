"""python -m icmixup: the same as the command icmixup."""

from __future__ import annotations

import sys

from icmixup.lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
