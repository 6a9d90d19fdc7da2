"""``python -m pycuda_conv``: the command ``pycuda-conv``."""

from pycuda_conv.cli import main

raise SystemExit(main())
