"""Which names of the notebook go with a cell, who owns them, and how they are packed."""
