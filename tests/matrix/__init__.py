"""The matrix of versions: a core suite, run in a fresh virtual environment for each row.

    python -m tests.matrix                        # all rows: the manual's table
    python -m tests.matrix --rows colab,newest    # some rows
    python -m tests.matrix --list                 # the rows and their Pythons, as JSON

A row names a Python and versions of torch, ipykernel, IPython and jupyter_client; all other
packages are the newest that fit.  An environment takes up to 6 GB while its row runs (PyPI's
torch is its CUDA build) and is deleted afterwards.  `uv` is used if it is installed, and pip
otherwise.  Only a Python is needed.

    bash tests/matrix/sid.sh FOLDER python3 -m tests.matrix --rows python-3.14

runs a row on a machine without a Python 3.14, in a chroot of Debian sid.
"""
