"""Covers: pyproject.toml, CITATION.cff, .github: what a release has, and what CI runs it with."""

import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import torchpmap as tp

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

PROGRAM = """
import torch
import torchpmap as tp

tp.init(num_devices=2, device_type="cpu")
total = tp.pmap(lambda x: tp.psum(x, "i"), axis_name="i", compile={"backend": "eager"})
print(tp.__file__, total(torch.tensor([1.0, 2.0])).tolist(), sep="\\n")
"""


def run(*command: str | Path, **options) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, **options
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def build(target: str, source: Path, folder: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, cwd=source)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The sdist, and the wheel that is built from it, as ``python -m build`` does."""
    pytest.importorskip("hatchling", reason="the back end of pyproject.toml")
    folder = tmp_path_factory.mktemp("packages")
    sdist = build("sdist", ROOT, folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    wheel = build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder / "wheel")
    return {"sdist": sdist, "wheel": wheel}


def test_a_wheel_from_the_sdist_has_the_whole_package(packages):
    files = [path for path in (ROOT / "torchpmap").rglob("*") if path.is_file()]
    there = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
    with zipfile.ZipFile(packages["wheel"]) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == there
    assert "torchpmap/py.typed" in found


def test_the_sdist_has_nothing_else(packages):
    with tarfile.open(packages["sdist"]) as archive:
        names = {"/".join(Path(name).parts[1:2]) for name in archive.getnames()}
    assert names - {".gitignore", "PKG-INFO"} == {
        *("torchpmap", "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml")
    }


@pytest.mark.long
@pytest.mark.cpu_only("the program asks for CPU devices")
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_package_runs_in_an_empty_environment(packages, kind, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    ours = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")})
    # The dependencies are there; a line of a .pth file comes after what is installed.
    (Path(ours) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ["install", "--no-index", "--no-deps", "--no-build-isolation", packages[kind]]
    run(sys.executable, "-m", "pip", "--python", python, *install)
    printed = run(python, "-I", "-c", PROGRAM, cwd=tmp_path).splitlines()
    assert printed == [f"{ours}/torchpmap/__init__.py", "[3.0, 3.0]"]


def test_every_file_names_the_same_version():
    assert f"\nversion: {tp.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## ([\w.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == tp.__version__


def test_ci_runs_the_oldest_torch_and_python():
    rows = re.findall(r'\{ torch: "?([^",]*)"?, python: "([\d.]+)" \}', workflow("ci.yml"))
    torches, pythons = ({row[k] for row in rows} for k in (0, 1))
    oldest = min(torches - {"", "nightly"}, key=numbers).removesuffix(".0")
    assert f"torch>={oldest}" in PROJECT["dependencies"]
    assert f">={min(pythons, key=numbers)}" == PROJECT["requires-python"]
    assert {"", "nightly"} < torches


def numbers(version):
    return tuple(map(int, version.split(".")))


def workflow(name):
    return (ROOT / ".github" / "workflows" / name).read_text()


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda p: p.name)
def test_forms_and_workflows_are_yaml(path):
    yaml = pytest.importorskip("yaml", reason="a dependency of the site")
    assert "name" in yaml.safe_load(path.read_text())
