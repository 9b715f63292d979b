"""`nbdist k8s`: an Indexed Job whose pods join a world, and the service that names them; pure.

The key is a Secret that the manifest refers to and does not have.
"""

from __future__ import annotations

import argparse
import json
import posixpath
import re
from collections.abc import Sequence
from typing import Any

from nbdist.cluster.ticket import join_key_file, place_from
from nbdist.config import read_memory
from nbdist.errors import UsageError
from nbdist.topology import parse_layout

KEY_FOLDER = "/var/run/secrets/nbdist"
KEY = "key"
MEMORY_FOLDER = "/dev/shm"

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?")
_MOUNT = re.compile(r"(?P<claim>[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?):(?P<path>/[^:]+)(?P<ro>:ro)?")


def manifest(asked: argparse.Namespace) -> str:
    """Write a service and a job, with the command for the secret in the first lines.

    What users have named is in quotes: a `y` would be true.  UsageError for what cannot be.
    """
    place = place_from(asked.place, "nbdist k8s")
    nodes = parse_layout(asked.layout).nodes
    for option, name in (("--name", asked.name), ("--secret", asked.secret)):
        if name and not _NAME.fullmatch(name):
            raise UsageError(
                f"`{option} {name}`: small letters, digits and `-`, such as `my-world`."
            )
    secret = asked.secret or f"{asked.name}-key"
    name, key = json.dumps(asked.name), json.dumps(f"{KEY_FOLDER}/{KEY}")
    labels = f"{{app.kubernetes.io/name: {name}, app.kubernetes.io/managed-by: nbdist}}"
    volumes, mounts = _volumes(asked.mount, secret)
    memory = f"{read_memory(asked.memory)}i" if asked.memory else ""
    limits = {"nvidia.com/gpu": asked.gpus, "cpu": asked.cpus, "memory": memory}
    limits = {name: str(much) for name, much in limits.items() if much}
    return f"""\
# The key first, from the machine of the notebook, which waits at {place}:
#   kubectl create secret generic {secret} --from-file={KEY}={join_key_file(place)}
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
  completions: {nodes}
  parallelism: {nodes}
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
          image: {json.dumps(asked.image)}
          command: ["nbdist", "join", {json.dumps(str(place))}, "--key-file", {key}]
          resources: {json.dumps({"limits": limits} if limits else {})}
          volumeMounts:{mounts}
      volumes:{volumes}
"""


def _volumes(claims: Sequence[str], secret: str) -> tuple[str, str]:
    """Write the volumes and their mounts; `claims` are CLAIM:/PATH, or CLAIM:/PATH:ro."""
    key = {"secret": {"secretName": secret, "defaultMode": 0o440}}
    # A container has 64 MB of shared memory otherwise, which tensors are lent through.
    memory = {"emptyDir": {"medium": "Memory"}}
    found: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"name": "key", **key}, {"name": "key", "mountPath": KEY_FOLDER, "readOnly": True}),
        ({"name": "shm", **memory}, {"name": "shm", "mountPath": MEMORY_FOLDER}),
    ]
    for number, text in enumerate(claims):
        if (asked := _MOUNT.fullmatch(text)) is None:
            raise UsageError(
                f"`--mount {text}`: CLAIM:/PATH, such as `datasets:/data` or `datasets:/data:ro`."
            )
        path = posixpath.normpath(asked["path"])
        if path in (mount["mountPath"] for _, mount in found):
            raise UsageError(f"`--mount {text}`: something is already mounted there.")
        name = {"name": f"mount-{number}"}
        claim = {"persistentVolumeClaim": {"claimName": asked["claim"]}}
        mount = {**name, "mountPath": path, "readOnly": bool(asked["ro"])}
        found.append((name | claim, mount))
    volumes = "".join(f"\n        - {json.dumps(volume)}" for volume, _ in found)
    return volumes, "".join(f"\n            - {json.dumps(mount)}" for _, mount in found)
