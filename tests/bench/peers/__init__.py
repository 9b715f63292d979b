"""nbdist beside the tools that its users would take: `python -m tests.bench.peers`.

    python -m tests.bench.peers                          all peers and rows
    python -m tests.bench.peers --only nbdist,ipyparallel --rows pass,stop
    python -m tests.bench.peers --json found.json --table docs/peers.md --plot docs/peers.png

Each peer has a virtual environment of its own, which sees the packages of the one that runs this,
so that all have the same torch, and is driven through a real notebook kernel, with four ranks.
Cells are what its own documentation shows.  "no" stands only where it was tried; the reason is in
the JSON file.  What a tool has no word for is a dash.

So far nbdist's cells were run, and some of ipyparallel's; no table of all has been made.
"""
