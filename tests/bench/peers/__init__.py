"""nbdist beside the tools that its users could take: `python -m tests.bench.peers`.

    python -m tests.bench.peers --write                  all, into README.md and docs; half an hour
    python -m tests.bench.peers --only nbdist,ipyparallel --rows pass,Stop
    python -m tests.bench.peers --json found.json        to a file, after each answer

Each peer has its own virtual environment, which sees the packages of this one, so that all have
the same torch, and is used through a real notebook kernel, with four ranks.  Cells are those of
the peer's own documentation.  "no" means that a trial failed; the reason is in the JSON file.  A
dash means that the tool has no command for the row.
"""
