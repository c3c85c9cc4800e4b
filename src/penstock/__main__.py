"""`python -m penstock` is the command `penstock`."""

import sys

from penstock.cli import main

sys.exit(main())
