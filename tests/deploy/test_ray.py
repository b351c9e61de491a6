"""The files of deploy/ray agree with the application and with each other; `make ray` runs one of them."""

from typing import Any

import pytest
from support.manifests import DEPLOY
from support.paths import ROOT

from fastinfer.ray_serve.options import parse_options

yaml = pytest.importorskip("yaml", reason="needs pyyaml")

RAY = DEPLOY / "ray"
SERVICE, POLICY = yaml.safe_load_all((RAY / "ray-service.yaml").read_text())
CONFIGS = {
    "serve.yaml": yaml.safe_load((RAY / "serve.yaml").read_text()),
    "ray-service.yaml": yaml.safe_load(SERVICE["spec"]["serveConfigV2"]),
}


def application(name: str) -> dict[str, Any]:
    [found] = CONFIGS[name]["applications"]
    return dict(found)


@pytest.mark.parametrize("name", CONFIGS)
def test_applications_are_ours(name: str) -> None:
    found = application(name)
    module, _, function = found["import_path"].partition(":")
    source = (ROOT / "python" / module.replace(".", "/")).with_suffix(".py").read_text()
    assert f"\ndef {function}(" in source
    for deployment in found["deployments"]:
        assert f'name="{deployment["name"]}"' in source
    assert parse_options(found["args"]).threads == 4


def test_only_pods_listen_on_all_addresses() -> None:
    assert CONFIGS["serve.yaml"]["http_options"]["host"] == "127.0.0.1"
    assert CONFIGS["ray-service.yaml"]["http_options"]["host"] == "0.0.0.0"


def test_a_pod_has_room_for_one_engine() -> None:
    cluster = SERVICE["spec"]["rayClusterConfig"]
    [group] = cluster["workerGroupSpecs"]
    options = parse_options(application("ray-service.yaml")["args"])
    pod = group["template"]["spec"]
    [container] = pod["containers"]
    assert int(group["rayStartParams"]["num-cpus"]) == options.threads == int(container["resources"]["requests"]["cpu"])
    [engine] = application("ray-service.yaml")["deployments"]
    assert engine["autoscaling_config"]["max_replicas"] == group["maxReplicas"]
    assert pod["terminationGracePeriodSeconds"] >= options.drain_timeout + 15
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_pods_have_no_rights_and_policies_find_them() -> None:
    cluster = SERVICE["spec"]["rayClusterConfig"]
    templates = [cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]]
    for template in templates:
        assert POLICY["spec"]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in template["spec"]["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["image"].endswith(":ray")


def test_image_and_cluster_have_the_same_ray() -> None:
    version = SERVICE["spec"]["rayClusterConfig"]["rayVersion"]
    assert f"ray[serve]=={version}" in (RAY / "Dockerfile").read_text()
