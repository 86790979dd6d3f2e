"""`python -m paceline.cli`, for where no `paceline` command is installed."""

import sys

from paceline.cli.app import main

sys.exit(main())
