"""`penstock` where no file may grow beyond some bytes, as on a disk that becomes full: BYTES, its words."""

from __future__ import annotations

import resource
import sys

from penstock.cli import main

if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), hard))
    sys.exit(main(sys.argv[2:]))
