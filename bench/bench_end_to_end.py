"""``fastinfer bench`` with its results in the same folder as those of the operators."""

import sys

from fastinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "--out", "bench/results", *sys.argv[1:]]))
