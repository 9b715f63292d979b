"""`python -m nbdist.terminal`, where the command `nbdist` is not on the path."""

from __future__ import annotations

import sys

from nbdist.terminal.console import main

sys.exit(main())
