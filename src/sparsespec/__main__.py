"""`python -m sparsespec`: the same as the `sparsespec` command."""

import sys

from sparsespec.cli.main import main

sys.exit(main())
