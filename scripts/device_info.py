"""The command ``pycuda-conv info`` from a checkout, installed or not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pycuda_conv.cli import main

raise SystemExit(main(["info", *sys.argv[1:]]))
