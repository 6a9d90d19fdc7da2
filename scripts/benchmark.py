"""The command ``pycuda-conv bench`` from a checkout, installed or not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pycuda_conv.cli import main

if __name__ == "__main__":  # processes that compile import this file
    raise SystemExit(main(["bench", *sys.argv[1:]]))
