"""`python -m splitfed` is the command `splitfed`."""

import sys

from splitfed.cli import main

sys.exit(main())
