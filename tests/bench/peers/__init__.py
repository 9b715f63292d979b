"""nbdist beside the tools that its users would take: `python -m tests.bench.peers`.

    python -m tests.bench.peers --write                  all, into README.md and docs; half an hour
    python -m tests.bench.peers --only nbdist,ipyparallel --rows pass,Stop
    python -m tests.bench.peers --json found.json        to a file, after each answer

Each peer has a virtual environment of its own, which sees the packages of the one that runs this,
so that all have the same torch, and is driven through a real notebook kernel, with four ranks.
Cells are what its own documentation shows.  "no" stands only where it was tried; the reason is in
the JSON file.  What a tool has no word for is a dash.
"""
