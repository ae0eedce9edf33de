"""``python -m warptile.convert``: the same program as the console script ``convert``."""

import sys

from .cli import main

sys.exit(main())
