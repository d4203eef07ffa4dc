"""What the chart's pods start does start: from the wheel, as they say, ready by their probes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from tests.deploy import chart_parts
from tests.deploy.chart_parts import CHART, CI_VALUES, Values, load_values, render
from tests.deploy.compose_parts import foreign_image
from tests.deploy.images import Image
from tests.deploy.release import NAMESPACE, Release
from tests.deploy.site import Container, Site
from tests.e2e.fleet import wait_for

# The first test waits for two engines to load, on whatever machine this is.
pytestmark = pytest.mark.timeout(400)

ADMIN_TOKEN = "of-the-operators"  # noqa: S105  # stands for a secret
TENANT_KEY = "key-of-acme"
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


@dataclass
class Shop:
    """A whole release that runs."""

    release: Release
    pods: dict[str, list[Container]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("pods")) as site:
        yield site


@pytest.fixture(scope="module")
def shop(
    site: Site,
    images: dict[str, Image],
    smollm2_dir: Path,
    kernels: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Shop:
    """Two gateways that share an index, Valkey and two engines, all ready; and a warm-up."""
    values = ci_values("replicas-valkey")
    values["gateway"]["replicas"] = 2
    values["warmup"] = ci_values("everything")["warmup"]
    values["secrets"]["adminToken"] = {"existingSecret": "warmlane-admin"}
    release = Release(
        site,
        render(values, namespace=NAMESPACE),
        {**images, "valkey/valkey": foreign_image("valkey")},
        tmp_path_factory.mktemp("volumes"),
        secrets=made_secrets(),
        volumes={"/models": smollm2_dir.parent},
        kernels=kernels,
    )
    serving = [one for one in release.objects if one["kind"] in ("Deployment", "StatefulSet")]
    for owner in serving:
        release.name_pods(owner)
    started = [(owner, release.start(owner)) for owner in serving]
    for owner, pods in started:
        for pod in pods:
            for probe in PROBES:
                release.wait_ready(pod, owner, probe)
    return Shop(release, {chart_parts.component(owner): pods for owner, pods in started})


def test_a_whole_release_becomes_ready_by_its_own_probes(site: Site, shop: Shop) -> None:
    running = {part: len(pods) for part, pods in shop.pods.items()}
    assert running == {"gateway": 2, "valkey": 1, "worker-runner": 2}
    for gateway in shop.pods["gateway"]:
        metrics = f"http://{gateway.address}:9090/metrics"

        def shares(url: str = metrics) -> bool:
            return "\nwarmlane_redis_up 1" in site.get(url).text

        wait_for(shares, "the gateway shares its index in Valkey")


def test_every_pod_may_write_temporary_files_and_nothing_else(site: Site, shop: Shop) -> None:
    look = """
import pathlib, tempfile
tempfile.TemporaryFile().close()
for folder in ("/", "/etc/warmlane", "/opt/warmlane", "/models", "/usr/local/bin", "/home"):
    try:
        pathlib.Path(folder, "probe").write_text("")
    except OSError:
        continue
    raise SystemExit(f"wrote to {folder}")
"""
    for pod in (*shop.pods["gateway"], *shop.pods["worker-runner"]):
        done = site.execute(pod, ["python", "-c", look])
        assert done.returncode == 0, done.stderr
        assert "plain torch" not in pod.output


def test_helm_test_is_served(shop: Shop) -> None:
    (test,) = chart_parts.of_kind(shop.release.objects, "Pod")
    (pod,) = shop.release.start(test)

    assert pod.wait() == 0, pod.output
    assert "served by" in pod.output


def test_the_warm_up_job_makes_its_document_warm(shop: Shop) -> None:
    (job,) = chart_parts.of_kind(shop.release.objects, "CronJob")
    (pod,) = shop.release.start(job)

    assert pod.wait() == 0, pod.output


def test_a_release_with_tls_and_tenants_serves_only_those_with_a_key(
    site: Site, shop: Shop, images: dict[str, Image], tmp_path: Path
) -> None:
    """Its engines are the shop's; what is under test is the gateway's pod and its Secrets."""
    release = Release(
        site,
        render(ci_values("tls-tenants"), name="tls", namespace=NAMESPACE),
        images,
        tmp_path,
        secrets=made_secrets(),
    )
    (engines,) = chart_parts.of_kind(release.objects, "StatefulSet")
    release.name_pods(engines, [pod.address for pod in shop.pods["worker-runner"]])
    owner = chart_parts.gateway_of(release.objects)
    release.name_pods(owner)
    (gateway,) = release.start(owner)
    for probe in PROBES:
        release.wait_ready(gateway, owner, probe)

    (test,) = chart_parts.of_kind(release.objects, "Pod")
    (pod,) = release.start(test)
    assert pod.wait() == 0, pod.output
    assert "served by" in pod.output
    models = f"https://{gateway.address}:8080/v1/models"
    assert site.get(models, verify=False).status_code == 401


@pytest.mark.parametrize("part", ["small", "large"])
def test_engines_with_lower_tiers_become_ready(
    part: str,
    site: Site,
    images: dict[str, Image],
    smollm2_dir: Path,
    kernels: Path,
    tmp_path: Path,
) -> None:
    release = Release(
        site,
        render(ci_values("two-runners"), name="two", namespace=NAMESPACE),
        images,
        tmp_path,
        volumes={"/models": models(tmp_path / "models", smollm2_dir)},
        kernels=kernels,
    )
    owner = chart_parts.find(release.objects, "StatefulSet", part)
    (pod,) = release.start(owner, replicas=1)

    release.wait_ready(pod, owner)
    site.stop(pod)


@pytest.mark.parametrize("path", CI_VALUES, ids=lambda path: path.stem)
def test_the_gateway_of_every_values_file_starts_before_anybody_else_is_there(
    path: Path, site: Site, images: dict[str, Image], smollm2_dir: Path, tmp_path: Path
) -> None:
    """Without engines, Redis, collector or API server: the pod lives, so that it may wait."""
    release = Release(
        site,
        render(load_values(path), name=path.stem, namespace=NAMESPACE),
        images,
        tmp_path,
        secrets=made_secrets(),
        volumes={"/tokenizers": tokenizers(tmp_path / "tokenizers", smollm2_dir)},
        service_account=service_account(tmp_path / "account"),
    )
    owner = chart_parts.gateway_of(release.objects)
    (gateway,) = release.start(owner, replicas=1)

    release.wait_ready(gateway, owner, "startupProbe")
    release.wait_ready(gateway, owner, "livenessProbe")
    site.stop(gateway)


def test_pods_that_are_told_to_end_do_so_in_good_order(shop: Shop) -> None:
    """The last test: nothing runs after it."""
    for pod in (*shop.pods["gateway"], *shop.pods["worker-runner"]):
        assert pod.terminate() == 0, pod.output


def ci_values(name: str) -> Values:
    return load_values(CHART / "ci" / f"{name}.yaml")


def made_secrets() -> dict[tuple[str, str], str]:
    """What operators make before they install with the values files of this folder."""
    certificate = trustme.CA().issue_cert("llm.example.com")
    (chain,) = certificate.cert_chain_pems
    return {
        ("warmlane-tls", "tls.crt"): chain.bytes().decode(),
        ("warmlane-tls", "tls.key"): certificate.private_key_pem.bytes().decode(),
        ("warmlane-admin", "admin-token"): ADMIN_TOKEN,
        ("warmlane-salt", "salt"): "sixteen bytes at least",
        ("tenant-keys", "acme"): TENANT_KEY,
        ("tenant-keys", "umbrella"): "0" * 64,
        ("valkey-login", "password"): "s3cret",
        ("redis-login", "uri"): "redis://:s3cret@10.77.255.2:6380/0",
    }


def tokenizers(folder: Path, model: Path) -> Path:
    """A volume with a model's tokenizer, as the values for vLLM expect it."""
    shutil.copytree(model, folder / "llama", ignore=shutil.ignore_patterns("*.gguf"))
    return folder


def models(folder: Path, model: Path) -> Path:
    """A volume with models under the names that values files have."""
    for name in ("smollm2", "qwen"):
        shutil.copytree(model, folder / name)
    return folder


def service_account(folder: Path) -> Path:
    """What the kubelet gives a pod that may ask the API server."""
    folder.mkdir()
    (folder / "ca.crt").write_bytes(trustme.CA().cert_pem.bytes())
    (folder / "token").write_text("a-token")
    (folder / "namespace").write_text(NAMESPACE)
    return folder
