"""`python -m tests.standin [ROW ...]`: print how long each row of the matrix takes."""

from __future__ import annotations

import sys

from tests.standin import matrix


def main() -> int:
    names = sys.argv[1:] or [*matrix.ROWS]
    sys.stdout.write(f"{'a rank':<38}{'all idle':>10}{'next right':>12}\n")
    with matrix.made() as world:
        for name in names:
            matrix.prepare(world)
            found = matrix.run(world, name)
            sys.stdout.write(f"{name:<38}{found.idle:>8.2f} s{found.healed:>10.2f} s  ")
            sys.stdout.write(f"{type(found.error).__name__}: {str(found.error)[:300]}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
