"""Entry point of ``python -m fastinfer``, the same program as ``fastinfer``."""

import sys

from fastinfer.cli.main import main

sys.exit(main())
