"""What runs where: a core suite, run in a fresh virtual environment per row of versions.

    python -m tests.matrix                        # all rows: the manual's table
    python -m tests.matrix --rows colab,newest    # some
    python -m tests.matrix --list                 # which there are

A row names a Python and versions of torch, ipykernel, IPython and jupyter_client; what it does
not name is the newest that goes with them.  Each environment takes up to 6 GB while its row runs
(PyPI's torch is its CUDA build) and is deleted after it.  `uv` is used where it is at hand, and
pip elsewhere.  This needs nothing but a Python.
"""
