"""What runs where: a core suite, run in a fresh virtual environment per row of versions.

    python -m tests.matrix                        # all rows: the manual's table
    python -m tests.matrix --rows colab,newest    # some
    python -m tests.matrix --list                 # which there are

A row names a Python and versions of torch, ipykernel, IPython and jupyter_client; what it does
not name is the newest that goes with them.  Each environment takes up to 6 GB while its row runs
(PyPI's torch is its CUDA build) and is deleted after it.  `uv` is used where it is at hand, and
pip elsewhere.  This needs nothing but a Python.

    bash tests/matrix/sid.sh FOLDER python3 -m tests.matrix --rows python-3.14

runs a row on a machine without a Python 3.14, in a chroot of Debian sid.
"""
