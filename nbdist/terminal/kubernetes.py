"""`nbdist k8s`: an Indexed Job whose pods join a world, and the service that names them; pure.

The key is a Secret that the manifest refers to and does not have.
"""

from __future__ import annotations

import json
import posixpath
import re
from dataclasses import dataclass
from typing import Any

from nbdist.cluster.ticket import Place, join_key_file
from nbdist.errors import UsageError

KEY_FOLDER = "/var/run/secrets/nbdist"
KEY = "key"
MEMORY_FOLDER = "/dev/shm"

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")
_MOUNT = re.compile(r"(?P<claim>[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?):(?P<path>/[^:]+)(?P<ro>:ro)?")


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


def mount_asked(text: str) -> Mount:
    """Read `CLAIM:/PATH`, or `CLAIM:/PATH:ro` for what pods only read; raises UsageError."""
    if (found := _MOUNT.fullmatch(text)) is None:
        raise UsageError(
            f"`--mount {text}`: CLAIM:/PATH, such as `datasets:/data` or `datasets:/data:ro`."
        )
    return Mount(found["claim"], posixpath.normpath(found["path"]), bool(found["ro"]))


def manifest(pods: Pods) -> str:
    """Write a service and a job, with the command for the secret in the first lines.

    What users have named is in quotes: a `y` would be true.  Raises UsageError.
    """
    pods.check()
    secret = pods.secret or f"{pods.name}-key"
    name, key = json.dumps(pods.name), json.dumps(f"{KEY_FOLDER}/{KEY}")
    labels = f"{{app.kubernetes.io/name: {name}, app.kubernetes.io/managed-by: nbdist}}"
    volumes, mounts = _volumes(pods, secret)
    memory = f"{pods.memory}i" if pods.memory else ""
    limits = {"nvidia.com/gpu": pods.gpus, "cpu": pods.cpus, "memory": memory}
    limits = {name: str(much) for name, much in limits.items() if much}
    return f"""\
# The key first, from the machine of the notebook, which waits at {pods.place}:
#   kubectl create secret generic {secret} --from-file={KEY}={join_key_file(pods.place)}
apiVersion: v1
kind: Service
metadata:
  name: {name}
  labels: {labels}
spec:
  clusterIP: None # it only gives names to the pods
  selector: {{app.kubernetes.io/name: {name}}}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
  labels: {labels}
spec:
  completionMode: Indexed
  completions: {pods.nodes}
  parallelism: {pods.nodes}
  backoffLimit: 6 # a node that is lost is started again, and joins between two cells
  ttlSecondsAfterFinished: 3600
  template:
    metadata:
      labels: {labels}
    spec:
      subdomain: {name}
      restartPolicy: Never
      terminationGracePeriodSeconds: 30 # an agent ends its workers
      containers:
        - name: agent
          image: {json.dumps(pods.image)}
          command: ["nbdist", "join", {json.dumps(str(pods.place))}, "--key-file", {key}]
          resources: {json.dumps({"limits": limits} if limits else {})}
          volumeMounts:{mounts}
      volumes:{volumes}
"""


def _volumes(pods: Pods, secret: str) -> tuple[str, str]:
    key = {"secret": {"secretName": secret, "defaultMode": 0o440}}
    # A container has 64 MB of shared memory otherwise, which tensors are lent through.
    memory = {"emptyDir": {"medium": "Memory"}}
    found: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"name": "key", **key}, {"name": "key", "mountPath": KEY_FOLDER, "readOnly": True}),
        ({"name": "shm", **memory}, {"name": "shm", "mountPath": MEMORY_FOLDER}),
    ]
    for number, mount in enumerate(pods.mounts):
        name = {"name": f"mount-{number}"}
        claim = {"persistentVolumeClaim": {"claimName": mount.claim}}
        found.append((name | claim, {**name, "mountPath": mount.path, "readOnly": mount.read_only}))
    volumes = "".join(f"\n        - {json.dumps(volume)}" for volume, _ in found)
    return volumes, "".join(f"\n            - {json.dumps(at)}" for _, at in found)
