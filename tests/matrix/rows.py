"""The rows: which versions are tried together, so many that each occurs, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OLDEST_TORCH = (2, 7)
"""From here on nbdist runs; `%load_ext` refuses what is older."""


@dataclass(frozen=True)
class Row:
    """One environment: its Python, and what is pinned in it."""

    name: str
    python: str
    pins: Mapping[str, str] = field(default_factory=dict)
    keeps_all: bool = False
    """Installing nbdist may change no package that is there already, named above or not."""

    @property
    def is_refused(self) -> bool:
        """Whether `%load_ext` is to say that this torch is too old, and nothing else is tried."""
        release = self.pins.get("torch", "").split(".")[:2]
        return len(release) == 2 and tuple(map(int, release)) < OLDEST_TORCH

    @property
    def requirements(self) -> list[str]:
        """As pip takes them."""
        return [f"{name}=={version}" for name, version in self.pins.items()] or ["torch"]


def _jupyter(ipykernel: str, ipython: str, jupyter_client: str) -> dict[str, str]:
    return {"ipykernel": ipykernel, "ipython": ipython, "jupyter_client": jupyter_client}


COLAB = {
    **_jupyter("6.17.1", "7.34.0", "7.4.9"),
    "pyzmq": "26.2.1",
    "tornado": "6.5.7",
    "traitlets": "5.7.1",
    "psutil": "5.9.5",
    "cloudpickle": "3.1.2",
    "numpy": "2.1.3",
    "notebook": "6.5.7",
    "torch": "2.11.0",
}
"""What stands in Colab's image, from which Kaggle's is built."""

ROWS = (
    Row("newest", "3.13"),
    Row("colab", "3.13", COLAB, keeps_all=True),
    Row("torch-2.15", "3.11", {"torch": "2.15.*", **_jupyter("6.29.5", "8.*", "8.6.*")}),
    Row("torch-2.14", "3.12", {"torch": "2.14.*"}),
    Row("torch-2.13", "3.11", {"torch": "2.13.*"}),
    Row("torch-2.12", "3.13", {"torch": "2.12.*", **_jupyter("6.29.5", "9.*", "8.*")}),
    Row("torch-2.11", "3.11", {"torch": "2.11.*", **_jupyter("6.17.1", "8.*", "7.4.9")}),
    Row("torch-2.10", "3.12", {"torch": "2.10.*", **_jupyter("6.29.5", "7.34.0", "8.*")}),
    Row("torch-2.9", "3.12", {"torch": "2.9.*", **_jupyter("6.17.1", "7.34.0", "7.4.9")}),
    Row("torch-2.8", "3.11", {"torch": "2.8.*", **_jupyter("6.29.5", "8.*", "7.4.9")}),
    Row("torch-2.7", "3.11", {"torch": "2.7.*", **_jupyter("6.29.5", "8.*", "8.*")}),
    Row("torch-2.6", "3.11", {"torch": "2.6.*"}),
    Row("python-3.14", "3.14"),
)
