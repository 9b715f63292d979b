"""The one display that a distributed cell's output is, as HTML.

Runs in the notebook kernel.  `live_html` while the cell runs, `final_html` once it has
ended, and after that one display for each of `leftovers`.
"""

from nbdist.notebook.final import final_html, leftovers
from nbdist.notebook.live import live_html

__all__ = ["final_html", "leftovers", "live_html"]
