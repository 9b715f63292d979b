"""Tests of `nbdist k8s`: manifests, checked against the API's own schemas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from nbdist.terminal.__main__ import main

WORDS = ["10.0.0.1:4321", "-j", "2x4", "--image", "registry.example.org/lab:1.0"]
WORDS += ["--gpus", "4", "--cpus", "16", "--memory", "64G"]
MOUNTS = ["--mount", "datasets:/data/:ro", "--mount", "runs.2026:/home/me"]
IN_IPV6 = ["[fd00::1]:4321", "-j", "1x4", "--image", "no", "--name", "on", "--secret", "my-key"]

Manifest = Callable[[list[str]], str]


@pytest.fixture
def manifest(capsys: pytest.CaptureFixture[str]) -> Manifest:
    """What the command writes."""

    def write(words: list[str]) -> str:
        assert main(["k8s", *words]) == 0
        return capsys.readouterr().out

    return write


def parsed(text: str) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all(text)]


@pytest.mark.parametrize("words", [WORDS + MOUNTS, IN_IPV6])
def test_the_api_takes_it(manifest: Manifest, words: list[str]) -> None:
    """By the schemas of Kubernetes, with nothing unknown; also where a name is a truth value."""
    checker = pytest.importorskip("kubernetes_validate", reason="it has the schemas")
    service, job = parsed(manifest(words))
    for document in (service, job):
        checker.validate(document, checker.latest_version(), strict=True)
    job["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(checker.ValidationError):
        checker.validate(job, checker.latest_version(), strict=True)


def test_pods_are_numbered_and_get_the_key_as_a_file(manifest: Manifest) -> None:
    """The key stands nowhere: a secret has it, which the first lines make."""
    text = manifest(WORDS + MOUNTS)
    job = parsed(text)[1]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    key = "/var/run/secrets/nbdist/key"
    assert container["command"] == ["nbdist", "join", "10.0.0.1:4321", "--key-file", key]
    assert container["resources"]["limits"] == {
        **{"nvidia.com/gpu": "4", "cpu": "16", "memory": "64Gi"}
    }
    assert pod["volumes"][0]["secret"] == {"secretName": "nbdist-key", "defaultMode": 0o440}
    claims = [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"][2:]]
    assert claims == ["datasets", "runs.2026"]
    assert [(each["mountPath"], each["readOnly"]) for each in container["volumeMounts"][2:]] == [
        ("/data", True),
        ("/home/me", False),
    ]
    service, other = parsed(manifest(IN_IPV6))  # texts, also those that would be truth values
    pod = other["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == other["metadata"]["name"] == pod["subdomain"] == "on"
    assert pod["containers"][0]["image"] == "no"
    assert pod["containers"][0]["command"][2] == "[fd00::1]:4321"
    first = text.splitlines()[1]
    assert first.startswith("#   kubectl create secret generic nbdist-key --from-file=key=/")
    assert first.endswith("/nbdist/joins/10.0.0.1-4321.key")


BAD = ("datasets", "datasets:data", "Data:/data", "data:/a:rw", ":/a")


def test_what_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """One line says what is wrong."""
    for wrong, said in (
        ([*WORDS, "--name", "My World"], "`--name My World`: small letters, digits and `-`, such"),
        (["somewhere", *WORDS[1:]], "`nbdist k8s somewhere`: it is HOST:PORT, as shown by the not"),
        ([*WORDS, "--mount", "a:/x", "--mount", "b:/x"], "`--mount b:/x`: something is already"),
        *(([*WORDS, "--mount", bad], f"`--mount {bad}`: CLAIM:/PATH, such as") for bad in BAD),
    ):
        assert main(["k8s", *wrong]) == 2
        assert capsys.readouterr().err.startswith(f"nbdist: {said}")
