"""``python -m fastinfer`` is the same program as ``fastinfer``."""

import sys

from fastinfer.cli.main import main

sys.exit(main())
