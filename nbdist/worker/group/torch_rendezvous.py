"""The store in which ranks meet where `--rdzv-backend` names one of torch's own rendezvous.

torch's registry makes the handler, also one of the user's packages (entry points
`torchrun.handlers`).  Each rank takes part, under another name whenever the group is formed, so
that a new rank finds the others.  torch's limits hold: c10d's store ends with the rank that has it;
nothing there is secret; a wait for ranks cannot be aborted, but ends after `JOIN_TIMEOUT`.
"""

from __future__ import annotations

import importlib
import os
from http.client import HTTPConnection, HTTPException
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from nbdist.wire.spec import TorchStore
from nbdist.words import one_line
from nbdist.worker.group.stores import AbortableStore
from nbdist.worker.process import BadEnvironment

JOIN_TIMEOUT = 25  # seconds for all ranks to come; agents wait 30 s for healing
ETCD = {"etcd", "etcd-v2"}
ANSWER_TIMEOUT = 3  # seconds for an etcd to answer; its client asks four times


class NoStore(BadEnvironment, RuntimeError):
    """There is none; the message, one line, says why."""


class TorchRendezvous:
    """One rank's part in it."""

    def __init__(self, where: TorchStore, rank: int) -> None:
        self.compares = True
        """Whether the store can compare a value and set another one, which etcd's cannot."""
        self._where, self.rank = where, rank
        # C++ that has a store keeps alive what it is there, and not what it is in Python; that
        # of etcd-v2, below the one that the handler gives, is the handler's.
        self._kept: list[Any] = []

    def meet(self, generation: int, size: int) -> Any:
        """Return the store of this generation once all ranks have come.  Raises NoStore."""
        # torch would open another port, for a store that is never used.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
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
                    rank=self.rank,
                    timeout=JOIN_TIMEOUT,
                    join_timeout=JOIN_TIMEOUT,
                    read_timeout=ANSWER_TIMEOUT if where.backend in ETCD else JOIN_TIMEOUT,
                )
            )
            store = handler.next_rendezvous().store
            # The handler would watch over the ranks: it ends once all have what it is for.
            if store.add("nbdist/parted", 1) == size:
                store.set("nbdist/all", "")
            store.wait(["nbdist/all"])
            handler.shutdown()
            if where.backend in ETCD:
                store = _EtcdStore(store, where)
        except Exception as error:  # whatever package the handler is of
            why = one_line(str(error.__cause__ or error)) or type(error).__name__
            raise _no_store(where, why) from error
        self._kept.append((handler, store))
        try:  # torch has no other way to find out (2.15)
            store.compare_set("nbdist/compared", "", "yes")
        except RuntimeError:
            self.compares = False
        return store


class _EtcdStore(AbortableStore):
    """The store that user code makes groups in, whose errors name its etcd."""

    def __init__(self, store: Any, where: TorchStore) -> None:
        super().__init__(store)
        self._where = where
        self._error = importlib.import_module("etcd").EtcdException

    def pass_on(self, name: str, *args: Any) -> Any:
        try:
            return super().pass_on(name, *args)
        except self._error as error:
            raise _no_store(self._where, f"no etcd answers there ({error}); start it") from None


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
