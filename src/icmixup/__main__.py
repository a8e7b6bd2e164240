"""python -m icmixup: the same as the command icmixup."""

from __future__ import annotations

import os
import sys

from icmixup.lab.cli import main

if __name__ == "__main__":
    code = main()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # At exit torch's own threads abort a rank now and then, and torchrun takes that for a failed run.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
