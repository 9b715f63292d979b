"""A transcript as people see it: HTML panels, text, and plain lines.

`live_html` while the cell runs, `final_html` once it has ended, and after that one display
for each of `leftovers`.  All of it is pure.
"""

from nbdist.notebook.draw.final import final_html, leftovers
from nbdist.notebook.draw.live import live_html
from nbdist.notebook.draw.text import final_text, live_text, whole_text

__all__ = ["final_html", "final_text", "leftovers", "live_html", "live_text", "whole_text"]
