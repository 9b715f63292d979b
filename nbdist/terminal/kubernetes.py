"""`nbdist k8s`: what a Kubernetes cluster needs to run one agent per pod, as YAML; pure.

An Indexed Job whose pods join the world that waits at a place, with the headless service that
gives them names.  The key is a Secret that the manifest refers to and does not have.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nbdist.cluster.ticket import Place, join_key_file, place_from
from nbdist.errors import UsageError

KEY_FOLDER = "/var/run/secrets/nbdist"
KEY = "key"
MEMORY_FOLDER = "/dev/shm"

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")
_MOUNT = re.compile(r"(?P<claim>[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?):(?P<path>/[^:]+)(?P<ro>:ro)?")
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9/._-]*")
_TRUE_OR_NULL = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


@dataclass(frozen=True, slots=True)
class Mount:
    """A PersistentVolumeClaim that each pod has at a path."""

    claim: str
    path: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Pods:
    """How many nodes, and what each is; `gpus cpus memory` are those of one node."""

    place: Place
    nodes: int
    image: str
    name: str = "nbdist"
    secret: str = ""
    gpus: int = 0
    cpus: int = 0
    memory: str = ""
    mounts: tuple[Mount, ...] = ()

    def check(self) -> None:
        """Raise UsageError for names that Kubernetes does not take, and two mounts at one path."""
        for option, name in (("--name", self.name), ("--secret", self.secret)):
            if name and not _NAME.fullmatch(name):
                raise UsageError(
                    f"`{option} {name}`: small letters, digits and `-`, such as `my-world`."
                )
        taken = {KEY_FOLDER, MEMORY_FOLDER}
        for mount in self.mounts:
            if mount.path in taken:
                raise UsageError(
                    f"`--mount {mount.claim}:{mount.path}`: something is already mounted there."
                )
            taken.add(mount.path)


def place_asked(text: str) -> Place:
    """Read the place that pods are to join; raises UsageError."""
    try:
        return place_from(text)
    except ValueError as why:
        raise UsageError(f"`nbdist k8s {text}`: {why}.") from None


def mount_asked(text: str) -> Mount:
    """Read `CLAIM:/PATH`, or `CLAIM:/PATH:ro` for what pods only read; raises UsageError."""
    if (found := _MOUNT.fullmatch(text)) is None:
        raise UsageError(
            f"`--mount {text}`: CLAIM:/PATH, such as `datasets:/data` or `datasets:/data:ro`."
        )
    return Mount(found["claim"], posixpath.normpath(found["path"]), bool(found["ro"]))


def manifest(pods: Pods) -> str:
    """Write the manifest, with what makes the secret in its first lines.

    Raises UsageError for names that there cannot be.
    """
    pods.check()
    secret = pods.secret or f"{pods.name}-key"
    documents = "---\n".join("\n".join(_lines(each)) + "\n" for each in documents_of(pods))
    return (
        f"# The key first, from the machine of the notebook, which waits at {pods.place}:\n"
        f"#   kubectl create secret generic {secret} --from-file={KEY}="
        f"{join_key_file(pods.place)}\n"
        f"{documents}"
    )


def documents_of(pods: Pods) -> list[dict[str, Any]]:
    """Make the service and the job."""
    labels = {"app.kubernetes.io/name": pods.name, "app.kubernetes.io/managed-by": "nbdist"}
    metadata = {"name": pods.name, "labels": labels}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        # Without an address of its own: it only gives names to the pods.
        "spec": {"clusterIP": "None", "selector": {"app.kubernetes.io/name": pods.name}},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": pods.nodes,
            "parallelism": pods.nodes,
            # A node that is lost is started again, and joins between two cells.
            "backoffLimit": 6,
            "ttlSecondsAfterFinished": 3600,
            "template": {"metadata": {"labels": labels}, "spec": _pod(pods)},
        },
    }
    return [service, job]


def _pod(pods: Pods) -> dict[str, Any]:
    volumes = [*_volumes(pods)]
    key_file = f"{KEY_FOLDER}/{KEY}"
    container = {
        "name": "agent",
        "image": pods.image,
        "command": ["nbdist", "join", str(pods.place), "--key-file", key_file],
        **_resources(pods),
        "volumeMounts": [{"name": volume["name"], **at} for volume, at in volumes],
    }
    return {
        "subdomain": pods.name,
        "restartPolicy": "Never",
        # As long as an agent takes to end its workers.
        "terminationGracePeriodSeconds": 30,
        "containers": [container],
        "volumes": [volume for volume, _ in volumes],
    }


def _volumes(pods: Pods) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each with where the container has it."""
    secret = {"secretName": pods.secret or f"{pods.name}-key", "defaultMode": 0o440}
    yield {"name": "key", "secret": secret}, {"mountPath": KEY_FOLDER, "readOnly": True}
    # A container has 64 MB there otherwise, which tensors are lent through.
    memory = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    yield memory, {"mountPath": MEMORY_FOLDER}
    for number, mount in enumerate(pods.mounts):
        claim = {"name": f"mount-{number}", "persistentVolumeClaim": {"claimName": mount.claim}}
        yield claim, {"mountPath": mount.path, "readOnly": mount.read_only}


def _resources(pods: Pods) -> dict[str, Any]:
    limits = {
        **({"nvidia.com/gpu": str(pods.gpus)} if pods.gpus else {}),
        **({"cpu": str(pods.cpus)} if pods.cpus else {}),
        **({"memory": f"{pods.memory}i"} if pods.memory else {}),
    }
    return {"resources": {"limits": limits}} if limits else {}


# --- YAML ---------------------------------------------------------------------------------


def _lines(value: Any, indent: str = "") -> Iterator[str]:
    """Write mappings and lists a line each; what they hold as JSON, which YAML takes too."""
    items = value.items() if isinstance(value, Mapping) else ((None, each) for each in value)
    for key, each in items:
        head = f"{indent}- " if key is None else f"{indent}{_scalar(key)}:"
        if isinstance(each, Mapping) and key is None:
            first, *rest = _lines(each, f"{indent}  ")
            yield f"{head}{first.lstrip()}"
            yield from rest
        elif isinstance(each, Mapping | list):
            yield head
            yield from _lines(each, f"{indent}  ")
        else:
            yield f"{head} {_scalar(each)}" if key is not None else f"{head}{_scalar(each)}"


def _scalar(value: Any) -> str:
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value)
    return value if is_plain and value.lower() not in _TRUE_OR_NULL else json.dumps(value)
