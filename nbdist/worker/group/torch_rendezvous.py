"""The store in which ranks meet where `--rdzv-backend` names one of torch's own rendezvous.

torch's registry makes the handler, also one that a package of the user's has registered there
(entry points `torchrun.handlers`); each rank takes part, as each node does with torchrun, and
what the handler says of ranks is not heeded: they are given.  All take part anew, under another
name, whenever the group is formed: so a rank that is new finds those that were there.

Torch's own limits hold: c10d's store is on one of the ranks, and ends with it until the group
is formed again; nothing of what goes there is secret to who can reach it; a wait for ranks to
come cannot be aborted, but ends after `JOIN_TIMEOUT`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from http.client import HTTPConnection, HTTPException
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from nbdist.wire.spec import TorchStore
from nbdist.words import one_line
from nbdist.worker.group.stores import AbortableStore
from nbdist.worker.process import BadEnvironment

JOIN_TIMEOUT = 25
"""Seconds for all ranks to come; agents wait 30 s for healing."""

ETCD = frozenset({"etcd", "etcd-v2"})

ANSWER_TIMEOUT = 3
"""Seconds for an etcd to answer.  Its client asks four times, and each time as long as is said."""

NO_OTHER_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torch would open another port, for a store that nobody asks."""


class NoStore(BadEnvironment, RuntimeError):
    """There is none; the message, one line, says why."""


class TorchRendezvous:
    """One rank's part in it."""

    def __init__(self, where: TorchStore, rank: int) -> None:
        self.compares = True
        """Whether the store can compare a value and set another one, which etcd's cannot."""
        self._where = where
        self._rank = rank
        # C++ that has a store keeps alive what it is there, and not what it is in Python; that
        # of etcd-v2, below the one that the handler gives, is the handler's.
        self._kept: list[Any] = []

    def __repr__(self) -> str:
        return f"<TorchRendezvous {self._where.backend} {self._where.endpoint}>"

    def meet(self, generation: int, size: int) -> Any:
        """Return the store of this generation once all ranks have come.

        Raises NoStore.
        """
        os.environ.update(NO_OTHER_STORE)
        where = self._where
        try:
            if where.backend in ETCD:
                _ask_etcd(where.endpoint)
            handler = get_rendezvous_handler(
                RendezvousParameters(
                    backend=where.backend,
                    endpoint=where.endpoint,
                    run_id=f"{where.name}-{generation}",
                    min_nodes=size,
                    max_nodes=size,
                    rank=self._rank,
                    timeout=JOIN_TIMEOUT,
                    join_timeout=JOIN_TIMEOUT,
                    read_timeout=ANSWER_TIMEOUT if where.backend in ETCD else JOIN_TIMEOUT,
                )
            )
            store = handler.next_rendezvous().store
            self._part(handler, store, size)
            if where.backend in ETCD:
                store = _EtcdStore(store, where)
        except Exception as error:  # whatever package the handler is of
            why = one_line(str(error.__cause__ or error)) or type(error).__name__
            raise _no_store(where, why) from error
        self._kept.append((handler, store))
        self.compares = _compares(store)
        return store

    def _part(self, handler: RendezvousHandler, store: Any, size: int) -> None:
        """End the handler, which would watch over the ranks, once all have what it is for."""
        if store.add("nbdist/parted", 1) == size:
            store.set("nbdist/all", "")
        store.wait(["nbdist/all"])
        handler.shutdown()


class _EtcdStore(AbortableStore):
    """Says where the etcd is that does not answer: what user code makes groups in."""

    def __init__(self, store: Any, where: TorchStore) -> None:
        super().__init__(store)
        self._where = where
        self._error = importlib.import_module("etcd").EtcdException

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise _no_store(self._where, f"no etcd answers there ({error}); start it") from None

    def awaited(
        self, keys: Sequence[str], timeout: timedelta | None, *, values: bool
    ) -> list[bytes]:
        with self._naming():
            return super().awaited(keys, timeout, values=values)

    def check(self, keys: Sequence[str]) -> bool:
        with self._naming():
            return super().check(keys)

    def set(self, key: str, value: Any) -> None:
        with self._naming():
            super().set(key, value)

    def add(self, key: str, value: int) -> int:
        with self._naming():
            return super().add(key, value)


def _no_store(where: TorchStore, why: str) -> NoStore:
    return NoStore(f"`--rdzv-backend {where.backend} --rdzv-endpoint {where.endpoint}`: {why}")


def _ask_etcd(endpoint: str) -> None:
    """Raise ConnectionError where none answers: torch's client would ask for minutes."""
    connection = HTTPConnection(endpoint, timeout=ANSWER_TIMEOUT)
    try:
        connection.request("GET", "/version")
        connection.getresponse()
    except (OSError, HTTPException) as error:
        why = getattr(error, "strerror", None) or error
        raise ConnectionError(f"no etcd answers there ({why}); start it") from None
    finally:
        connection.close()


def _compares(store: Any) -> bool:
    """Try it: torch knows no other way to find out (2.15)."""
    try:
        store.compare_set("nbdist/compared", "", "yes")
    except RuntimeError:
        return False
    return True
