"""`python -m tests.bench.assistant`: seeded faults, and whether `nbdist mcp` names their causes.

Each fault happens on a real kernel with four ranks, and a real client of the Model Context
Protocol asks at most three questions, as the server's own instructions say for what a user would
complain of: it hangs, it failed, ranks differ, it is slow.  The facts that name the cause (rank,
line, operation, amount, ...) have to be in the answers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from mcp import Client, StdioServerParameters

from tests.notebook.front_end import Notebook

RANKS = 4
WORLD = f"faults-{os.getpid()}"
SETTLE = 2.5
"""Seconds into a cell that hangs before the first question."""

QUESTIONS = {
    "hang": ("status", "why", "stacks"),
    "mismatch": ("why", "status", "output"),
    "death": ("why", "status", "output"),
    "memory": ("why", "status", "output"),
    "divergence": ("status", "diff"),
    "slow": ("timeline", "status", "why"),
}

MODEL = """%%distributed
import os, time, ctypes, signal, threading, numpy
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
step, history = 7, [1.0, 2.0]"""


@dataclass(frozen=True)
class Fault:
    """A cell that goes wrong, a cell that mends the ranks, and the facts that name the cause."""

    kind: str
    cell: str
    facts: tuple[str, ...]
    mend: str = ""


def faults(seed: int) -> Iterator[Fault]:
    """Yield five faults of each kind, with ranks, lines and amounts chosen by the seed."""
    dice = random.Random(seed)

    def rank() -> int:
        return dice.randrange(RANKS)

    for body in (
        "time.sleep(600)",
        "while True: pass",
        "threading.Event().wait()",
        "os.read(os.pipe()[0], 1)",
        "ctypes.PyDLL(None).sleep(8)",
    ):
        odd = rank()
        pad = "\n".join(f"value_{n} = {n}" for n in range(dice.randrange(1, 5)))
        source = f"{pad}\nif rank == {odd}:\n    {body}\ndist.all_reduce(torch.ones(4))"
        line = source[: source.index(body)].count("\n") + 2
        where = "busy in C code that holds the GIL" if "PyDLL" in body else f"in line {line}"
        yield Fault("hang", source, (f"rank {odd} is {where}", "all_reduce"))
    for ours, others, facts in (
        ("dist.barrier()", "dist.all_reduce(torch.ones(4))", ("barrier", "all_reduce")),
        ("dist.all_reduce(torch.ones(3))", "dist.all_reduce(torch.ones(4))", ("[3]", "[4]")),
        (
            "dist.all_reduce(torch.ones(4, dtype=torch.float64))",
            "dist.all_reduce(torch.ones(8))",
            ("float64", "float32"),
        ),
        (
            "dist.all_gather_into_tensor(torch.ones(16), torch.ones(4))",
            "dist.all_reduce(torch.ones(4))",
            ("all_gather", "all_reduce"),
        ),
        ("pass", "dist.barrier()", ("barrier", "finished the cell")),
    ):
        odd = rank()
        cell = f"if rank == {odd}:\n    {ours}\nelse:\n    {others}"
        yield Fault("mismatch", cell, (f"rank {odd}", *facts))
    for body, fact in (
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("os._exit(3)", "code 3"),
        ("ctypes.string_at(0)", "SIGSEGV"),
        ("os.abort()", "SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)", "SIGTERM"),
    ):
        odd = rank()
        cell = f"if rank == {odd}:\n    {body}\ndist.barrier()"
        yield Fault("death", cell, (f"first failure: rank {odd}:", fact), MODEL)
    for body, facts in (
        ("torch.empty(1 << 45)", ("memory", str(4 << 45))),
        ("numpy.ones(1 << 46)", ("Unable to allocate", "512. TiB")),
        ("bytearray(1 << 50)", ("MemoryError",)),
        ("model[0].weight.repeat(1 << 20, 1 << 16)", ("memory",)),
        ("history * (1 << 55)", ("MemoryError",)),
    ):
        odd = rank()
        cell = f"if rank == {odd}:\n    {body}\ndist.barrier()"
        yield Fault("memory", cell, (f"first failure: rank {odd}:", body, *facts))
    for change, mend, fact in (
        ("model[2].weight.data[3, 4] += 0.5", "model[2].weight.data[3, 4] -= 0.5", "2.weight"),
        ("model[1].bias.data.mul_(2)", "model[1].bias.data.div_(2)", "1.bias"),
        ("step += 1", "step -= 1", "step"),
        ("history[1] = 2.5", "history[1] = 2.0", "history"),
        ("torch.nn.init.zeros_(model[3].bias)", "", "3.bias"),
    ):
        odd = rank()
        yield Fault(
            "divergence",
            f"if rank == {odd}:\n    {change}",
            (f"rank {odd}", fact),
            f"%%distributed\nif rank == {odd}:\n    {mend}" if mend else MODEL,
        )
    for body in (
        "time.sleep(0.15)",
        "sum(range(4_000_000))",
        "end = time.monotonic() + 0.15\n        while time.monotonic() < end: pass",
        "torch.ones(600, 600) @ torch.ones(600, 600); time.sleep(0.12)",
        "sorted(range(10)); threading.Event().wait(0.2)",
    ):
        odd = rank()
        cell = (
            f"for _ in range(8):\n    if rank == {odd}:\n        {body}\n"
            "    dist.all_reduce(torch.ones(4))"
        )
        yield Fault("slow", cell, (f"for rank {odd}, which came last", "waited"))


class Asking:
    """Questions to a server about faults, and the seconds that each answer took."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.seconds: list[float] = []

    async def names_cause(self, fault: Fault) -> tuple[int, str]:
        """Ask until answers have all facts; return their number, 0 for never, and their text."""
        told = ""
        for number, question in enumerate(QUESTIONS[fault.kind], 1):
            named = {"names": "model step history"} if question == "diff" else {}
            before = time.monotonic()
            answer = await self._client.call_tool(question, {"world": WORLD, **named})
            self.seconds.append(time.monotonic() - before)
            told += "\n".join(getattr(each, "text", "") for each in answer.content) + "\n"
            if all(fact in told for fact in fault.facts):
                return number, told
        return 0, told


async def measure(seed: int, only: str, *, shows: bool) -> int:
    """Print a line for each fault, and how many were named; return how many were not."""
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "nbdist.terminal", "mcp"], env={**os.environ}
    )
    found: Counter[str] = Counter()
    every: Counter[str] = Counter()
    with closing(
        Notebook("%load_ext nbdist", f"%dist_init -n {RANKS} --name {WORLD}", MODEL)
    ) as notebook:
        async with Client(command) as client:
            asking = Asking(client)
            for fault in faults(seed):
                if only not in ("", fault.kind):
                    continue
                number, told = await one(notebook, asking, fault)
                every[fault.kind] += 1
                found[fault.kind] += number > 0
                said = f"named after {number}" if number else "NOT NAMED"
                sys.stdout.write(f"{fault.kind:10} {said:14} {fault.facts}\n")
                sys.stdout.flush()
                if not number or shows:
                    sys.stdout.write(f"{told}\n")
        each = ", ".join(f"{kind} {found[kind]}/{every[kind]}" for kind in every)
        middle = sorted(asking.seconds)[len(asking.seconds) // 2]
        sys.stdout.write(
            f"{found.total()} of {every.total()} ({each}); an answer in {middle:.2f} s (median), "
            f"{max(asking.seconds):.2f} s at most\n"
        )
    return every.total() - found.total()


async def one(notebook: Notebook, asking: Asking, fault: Fault) -> tuple[int, str]:
    """Cause the fault, ask about it, and mend the ranks."""
    cell = f"%%distributed\n{fault.cell}"
    if fault.kind == "hang":
        request = notebook.client.execute(cell, stop_on_error=False)
        await asyncio.sleep(SETTLE)
        found = await asking.names_cause(fault)
        notebook.manager.interrupt_kernel()
        notebook.reply_to(request)
    else:
        notebook.run(cell)
        found = await asking.names_cause(fault)
    if fault.mend:
        notebook.run(fault.mend)
    return found


def main() -> int:
    """Measure all kinds of faults, or a single kind."""
    parser = argparse.ArgumentParser("python -m tests.bench.assistant", description=__doc__)
    parser.add_argument("--seed", type=int, default=25)
    parser.add_argument("--only", default="", choices=("", *QUESTIONS), help="one kind of faults")
    parser.add_argument("--show", action="store_true", help="also the answers")
    options = parser.parse_args()
    return min(1, asyncio.run(measure(options.seed, options.only, shows=options.show)))


if __name__ == "__main__":
    sys.exit(main())
