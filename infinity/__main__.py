"""`python -m infinity` is the command `infinity`."""

import sys

from infinity.cli.main import main

sys.exit(main())
