"""The wheel holds all that it needs: build it, install it alone, and use it from another folder.

    python scripts/check_wheel.py .venv/bin/python

Run by the Python of an environment that has `build`, as `make check-wheel` does. The argument is an
interpreter whose environment has the dependencies; the checkout itself is out of its sight.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PATHS = """
import sys, sysconfig
own = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
print("\\n".join(p for p in sys.path if p and p not in own and "site-packages" in p))
"""
"""Where an interpreter has its packages, the standard library and a checkout left out."""

CLOSURE = """
import sys
from importlib.metadata import distribution
from packaging.requirements import Requirement

left, seen = [(Requirement(line), "") for line in sys.argv[1:]], set()
while left:
    requirement, extra = left.pop()
    if (requirement.name, extra) in seen:
        continue
    if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
        continue
    seen.add((requirement.name, extra))
    found = distribution(requirement.name)
    for line in found.requires or []:
        left += [(Requirement(line), each) for each in (requirement.extras or {""})]
    tops = {file.parts[0] for file in found.files if file.parts[0] not in ("..", "__pycache__")}
    print(*(found.locate_file(top) for top in tops), sep="\\n")
"""
"""Prints the files and folders of requirements and of all that they require in turn."""

ALONE = """
import asymgrpo, torch
loaded = asymgrpo.Objective(asymgrpo.algorithm("sa-ah-grpo"))
print(f"torch {torch.__version__} and the objective in {asymgrpo.__file__}")
"""

USES = """
import asymgrpo
from asymgrpo.experiment.settings import load_recipe, recipe_files
from asymgrpo.models import load_policy
assert {root!r} not in asymgrpo.__file__, asymgrpo.__file__
assert len(recipe_files()) == {recipes}, recipe_files()
for name in recipe_files():
    load_recipe(name)
load_policy("tiny")
print(f"{{len(recipe_files())}} recipes and the built-in model in {{asymgrpo.__file__}}")
"""

SMALL = (
    *("compare", "--config", "demo", "--algorithms", "grpo,sa-ah-grpo", "--seeds", "2"),
    *("--steps", "2", "--eval-every", "2", "--set", "eval_problems=8", "--set", "eval_samples=2"),
    *("--set", "per_device_train_batch_size=16"),
)
"""The demo, cut down to seconds: recipe, model, task and page."""


def run(*command: object, cwd: Path) -> str:
    """What a command prints; where it fails, that is printed and this ends."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}\nfailed with {done.returncode}")
    return done.stdout


def check_content(wheel: Path) -> None:
    """Every file of the package in the checkout is in the wheel, and nothing else is."""
    package = ROOT / "src" / "asymgrpo"
    wanted = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    if wanted != held:
        sys.exit(f"missing: {sorted(wanted - held)}; too much: {sorted(held - wanted)}")
    print(f"{wheel.name}: {len(held)} files, {wheel.stat().st_size / 1e6:.1f} MB")


def environment_of(wheel: Path, extra: str, interpreter: str, folder: Path) -> Path:
    """An environment with the wheel and what it requires, as pip would make it; nothing else."""
    run(interpreter, "-m", "venv", folder / f"env-{extra}", cwd=folder)
    programs = folder / f"env-{extra}" / "bin"
    run(programs / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = (folder / f"env-{extra}" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        held = archive.read(name).decode()
    lines = re.findall(r"^Requires-Dist: (.*)$", held, re.MULTILINE)
    # The wheel is in no environment of the interpreter's, so its own lines are chosen here.
    base = [line for line in lines if "extra ==" not in line]
    chosen = [re.sub(r";.*", "", line) for line in lines if f'extra == "{extra}"' in line]
    for path in run(interpreter, "-c", CLOSURE, *base, *chosen, cwd=folder).split():
        if not (site / Path(path).name).exists():
            (site / Path(path).name).symlink_to(path)
    return programs


def refused(*command: object, cwd: Path) -> str:
    """The one line of a command that asks for more than is installed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, text=True, capture_output=True, check=False)
    if done.returncode != 2 or len(done.stderr.splitlines()) != 1:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}\nended with {done.returncode}")
    return done.stderr.strip()


def check_extras(wheel: Path, interpreter: str, folder: Path) -> None:
    """What works with the objective alone, what with the extra that reads runs."""
    alone = environment_of(wheel, "", interpreter, folder)
    print("asymgrpo:", run(alone / "python", "-c", ALONE, cwd=folder).strip())
    print("  ", refused(alone / "asymgrpo", "algorithms", cwd=folder))
    reading = environment_of(wheel, "report", interpreter, folder)
    lines = run(reading / "asymgrpo", "algorithms", cwd=folder).splitlines()
    print(f"asymgrpo[report]: algorithms, {len(lines)} lines")
    print("  ", refused(reading / "asymgrpo", "train", "--steps", "1", cwd=folder))


def environment_with(wheel: Path, interpreter: str, folder: Path) -> Path:
    """An environment with the wheel in it, which finds the interpreter's other packages."""
    packages = run(interpreter, "-c", PATHS, cwd=folder)
    run(interpreter, "-m", "venv", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(packages, encoding="utf-8")
    return python.parent


def main(interpreter: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
        (wheel,) = folder.glob("*.whl")
        check_content(wheel)
        programs = environment_with(wheel, interpreter, folder)
        place = folder / "elsewhere"
        place.mkdir()
        recipes = len(list((ROOT / "src/asymgrpo/recipes").glob("*.yaml")))
        uses = USES.format(root=str(ROOT), recipes=recipes)
        print(run(programs / "python", "-c", uses, cwd=place).strip().splitlines()[-1])
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        examples = "\n".join(re.findall(r"^```python\n(.*?)^```", readme, re.S | re.M))
        print("README:", run(programs / "python", "-c", examples, cwd=place).strip())
        algorithms = run(programs / "asymgrpo", "algorithms", cwd=place)
        print("asymgrpo algorithms:", len(algorithms.splitlines()), "lines")
        check_extras(wheel, interpreter, folder)
        run(programs / "asymgrpo", *SMALL, cwd=place)
        page = place / "runs" / "demo" / "report.html"
        print(f"asymgrpo {' '.join(SMALL)}: {page.name}, {page.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    # Not resolved: a symbolic link is how an environment's interpreter knows its environment.
    main(str(Path(sys.argv[1]).absolute()))
