"""`python -m infinity` is the command `infinity`."""

import sys

from infinity.command.main import main

sys.exit(main())
