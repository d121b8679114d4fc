"""Entry point of `python -m infinity`, which is the command `infinity`."""

import sys

from infinity.cli.main import main

sys.exit(main())
