"""Tests of `nbdist.terminal.kubernetes`: manifests, checked against the API's own schemas."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from nbdist.cluster.ticket import Place
from nbdist.terminal.__main__ import main
from nbdist.terminal.kubernetes import Mount, Pods, manifest

PODS = Pods(
    Place("10.0.0.1", 4321),
    2,
    "registry.example.org/lab:1.0",
    gpus=4,
    cpus=16,
    memory="64G",
    mounts=(Mount("datasets", "/data", read_only=True), Mount("runs.2026", "/home/me")),
)
IN_IPV6 = Pods(Place("fd00::1", 4321), 1, "no", "on", secret="my-key")


def parsed(pods: Pods) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all(manifest(pods))]


@pytest.mark.parametrize("pods", [PODS, IN_IPV6])
def test_the_api_takes_it(pods: Pods) -> None:
    """By the schemas of Kubernetes, with nothing unknown; also where a name is a truth value."""
    checker = pytest.importorskip("kubernetes_validate", reason="it has the schemas")
    for document in parsed(pods):
        checker.validate(document, checker.latest_version(), strict=True)
    broken = parsed(pods)[1]
    broken["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(checker.ValidationError):
        checker.validate(broken, checker.latest_version(), strict=True)


def test_pods_are_numbered_and_get_the_key_as_a_file() -> None:
    """The key stands nowhere: a secret has it, which the first lines make."""
    job = parsed(PODS)[1]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    key = "/var/run/secrets/nbdist/key"
    assert container["command"] == ["nbdist", "join", "10.0.0.1:4321", "--key-file", key]
    assert container["resources"]["limits"] == {
        **{"nvidia.com/gpu": "4", "cpu": "16", "memory": "64Gi"}
    }
    assert pod["volumes"][0]["secret"] == {"secretName": "nbdist-key", "defaultMode": 0o440}
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    claims = {
        mounted[each["name"]]: each["persistentVolumeClaim"]["claimName"]
        for each in pod["volumes"]
        if "persistentVolumeClaim" in each
    }
    assert claims == {"/data": "datasets", "/home/me": "runs.2026"}
    assert [each["readOnly"] for each in container["volumeMounts"][2:]] == [True, False]
    service, other = parsed(IN_IPV6)  # texts, also those that would be truth values
    pod = other["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == other["metadata"]["name"] == pod["subdomain"] == "on"
    assert pod["containers"][0]["image"] == "no"
    assert pod["containers"][0]["command"][2] == "[fd00::1]:4321"
    first = manifest(PODS).splitlines()[1]
    assert first.startswith("#   kubectl create secret generic nbdist-key --from-file=key=/")
    assert first.endswith("/nbdist/joins/10.0.0.1-4321.key")


BAD = ("datasets", "datasets:data", "Data:/data", "data:/a:rw", ":/a")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """It writes the manifest, with any number of mounts, or one line of what is wrong."""
    words = ["10.0.0.1:4321", "-j", "2x4", "--image", "lab", "--gpus", "4", "--memory", "64G"]
    assert main(["k8s", *words, "--mount", "datasets:/data/:ro", "--mount", "runs:/runs"]) == 0
    mounts = (Mount("datasets", "/data", read_only=True), Mount("runs", "/runs"))
    asked = Pods(Place("10.0.0.1", 4321), 2, "lab", gpus=4, memory="64G", mounts=mounts)
    assert capsys.readouterr().out == manifest(asked)
    for wrong, said in (
        ([*words, "--name", "My World"], "`--name My World`: small letters, digits and `-`, such"),
        (["somewhere", *words[1:]], "`nbdist k8s somewhere`: it is HOST:PORT, as shown by the not"),
        ([*words, "--mount", "a:/x", "--mount", "b:/x"], "`--mount b:/x`: something is already"),
        *(([*words, "--mount", bad], f"`--mount {bad}`: CLAIM:/PATH, such as") for bad in BAD),
    ):
        assert main(["k8s", *wrong]) == 2
        assert capsys.readouterr().err.startswith(f"nbdist: {said}")
