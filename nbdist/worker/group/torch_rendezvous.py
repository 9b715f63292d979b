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
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from typing import Any, TypeVar, cast

from torch.distributed.elastic.rendezvous import RendezvousParameters
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
        self.compares = _compares(store)
        return store


Method = TypeVar("Method", bound=Callable[..., Any])


def _naming(method: Method) -> Method:
    """Make a method of `_EtcdStore` that says where the etcd is that does not answer."""

    def named(store: _EtcdStore, *args: Any, **options: Any) -> Any:
        try:
            return method(store, *args, **options)
        except store.error as error:
            raise _no_store(store.where, f"no etcd answers there ({error}); start it") from None

    return cast("Method", named)


class _EtcdStore(AbortableStore):
    """The store that user code makes groups in, whose errors name its etcd."""

    def __init__(self, store: Any, where: TorchStore) -> None:
        super().__init__(store)
        self.where = where
        self.error = importlib.import_module("etcd").EtcdException

    awaited = _naming(AbortableStore.awaited)
    check = _naming(AbortableStore.check)
    set = _naming(AbortableStore.set)
    add = _naming(AbortableStore.add)


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
