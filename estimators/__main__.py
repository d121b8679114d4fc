"""`python -m estimators` is the command `infinity-estimate`."""

import sys

from estimators.cli import main

sys.exit(main())
