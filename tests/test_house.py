"""The house: imports point one way, the mathematics stays small, and light rooms stay light.

Every import counts, also one inside a function, under TYPE_CHECKING, or by `import_module`.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import asymgrpo

HOME = Path(asymgrpo.__file__).parent
FILES = sorted(HOME.rglob("*.py"))

MAY_IMPORT = {
    "errors": set(),
    "secrets": set(),
    "visible": set(),
    "objective": set(),
    "tasks": {"errors"},
    "models": {"errors"},
    "kernels": {"errors", "objective"},
    "rollout": {"errors", "objective", "kernels", "models"},
    "training": {
        *("errors", "secrets", "visible", "objective"),
        *("kernels", "models", "rollout", "tasks"),
    },
    "evaluation": {"errors", "objective", "kernels", "models", "rollout", "tasks"},
    "__init__": {"objective"},
}
MAY_IMPORT["experiment"] = {*MAY_IMPORT} - {"__init__"}
MAY_IMPORT["report"] = MAY_IMPORT["experiment"] | {"experiment"}
MAY_IMPORT["cli"] = MAY_IMPORT["report"] | {"report"}
MAY_IMPORT["__main__"] = {"cli"}

ONLY_IN = {"trl": "training/trl.py", "verl": "training/verl.py"}
"""Libraries that one file alone may import."""

LIGHT = ("tasks/", "report/")
LIGHT_FILES = tuple(
    f"experiment/{name}.py"
    for name in (
        *("identity", "store", "statistics"),
        *("compare", "comparison", "curves", "headline", "pairs", "scores"),
    )
)


def place(path: Path) -> str:
    return path.relative_to(HOME).as_posix()


def room_of(path: Path) -> str:
    """The folder below the package, or the name of a file that stands alone in it."""
    return path.relative_to(HOME).parts[0].removesuffix(".py")


def imports(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = ["asymgrpo", *path.relative_to(HOME).parent.parts]
            base = parts[: len(parts) + 1 - node.level] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            if called in ("import_module", "__import__") and (name := literal(node.args[0])):
                yield node.lineno, name


def literal(node: ast.AST) -> str:
    """A string, or what an f-string begins with."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def objections(tree: ast.AST, path: Path) -> list[str]:
    """What is wrong with the imports of one file."""
    found, room, file = [], room_of(path), place(path)
    light = file.startswith(LIGHT) or file in LIGHT_FILES
    for line, name in imports(tree, path):
        top, *rest = name.split(".")
        where = f"{file}:{line} imports {name}"
        if top == "asymgrpo":
            other = rest[0] if rest else "__init__"
            # `from asymgrpo import algorithm`: a public name, which the objective defines.
            other = other if other in MAY_IMPORT else "objective"
            if other != room and other not in MAY_IMPORT[room]:
                found.append(f"{where}: {room} may not import {other}")
        elif room == "objective" and top != "torch" and top not in sys.stdlib_module_names:
            found.append(f"{where}: objective is torch and the standard library")
        elif light and top == "torch":
            found.append(f"{where}: this file works without torch")
        elif top in ONLY_IN and file != ONLY_IN[top]:
            found.append(f"{where}: only {ONLY_IN[top]} may")
    return found


@pytest.mark.parametrize("path", FILES, ids=place)
def test_imports_point_one_way(path):
    assert room_of(path) in MAY_IMPORT, f"{place(path)} is in no room: give it one in MAY_IMPORT"
    assert not objections(ast.parse(path.read_text()), path)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("objective/ratio.py", "import numpy"),
        ("objective/ratio.py", "from asymgrpo.errors import UserError"),
        ("objective/ratio.py", "from ..kernels.decode import token_sampling"),
        ("kernels/decode/pdl.py", "from asymgrpo.rollout.records import Rollout"),
        ("kernels/decode/pdl.py", "from ... import training"),
        ("tasks/base.py", "def f():\n    import torch.nn"),
        ("tasks/base.py", "from asymgrpo.evaluation import pass_at_k"),
        ("models/policy.py", "import asymgrpo.rollout.native"),
        ("training/scorer.py", "from trl import GRPOTrainer"),
        ("training/trl.py", "import verl.utils"),
        ("training/trl.py", "from asymgrpo.evaluation import pass_at_k"),
        ("tasks/own.py", "from asymgrpo.training.trl import AsymGRPOTrainer"),
        ("rollout/scheduler.py", "if TYPE_CHECKING:\n    from asymgrpo.training.trl import X"),
        ("evaluation/evaluate.py", "importlib.import_module(f'asymgrpo.experiment.{name}')"),
        ("experiment/store.py", "from torch import Tensor"),
        ("experiment/run.py", "from asymgrpo.cli import main"),
        ("report/page.py", "import asymgrpo.cli"),
        ("errors.py", "import asymgrpo.objective.batch"),
    ],
)
def test_an_import_against_the_arrows_is_found(file, line):
    assert len(objections(ast.parse(line), HOME / file)) == 1


STILL_TWICE = {"compare", "curves", "settings"}
"""Module names that still occur twice; each goes from this list once one of the two is renamed."""


def test_no_module_name_occurs_twice():
    count = Counter(path.stem for path in FILES if path.stem != "__init__")
    assert {name for name, times in count.items() if times > 1} == STILL_TWICE


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("path", sorted((HOME / "objective").glob("*.py")), ids=place)
def test_the_objective_stays_small(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 210
    for function in functions(ast.parse(text)):
        start = function.body[0].lineno if ast.get_docstring(function) else function.lineno
        skipped = function.body[0].end_lineno - start + 1 if ast.get_docstring(function) else 0
        length = function.end_lineno - function.lineno + 1 - skipped
        assert length <= 40, f"{function.name} has {length} lines without its docstring"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_the_package_does_not_import_torch():
    assert run_python("import sys, asymgrpo; print('torch' in sys.modules)") == "False"


def test_public_names_load_when_asked_for():
    code = "import asymgrpo; [getattr(asymgrpo, name) for name in asymgrpo.__all__]; print('ok')"
    assert run_python(code) == "ok"
    with pytest.raises(AttributeError, match="has no attribute 'algorythm'"):
        _ = asymgrpo.algorythm


def test_the_objective_needs_torch_and_numpy_alone():
    """With every other package of the environment out of reach, as after a plain install."""
    code = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {others!r}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import asymgrpo, doctest
assert doctest.testmod(asymgrpo).failed == 0
try:
    import transformers
except ModuleNotFoundError:
    print("alone")
"""
    project = tomllib.loads((HOME.parents[1] / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    names = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in extras}
    others = sorted(names - {"asymgrpo", "triton", "jinja2"} | {"yaml"})
    assert {"transformers", "trl", "typer", "scipy"} <= {*others}
    assert run_python(code.replace("{others!r}", repr(others))) == "alone"


def test_light_rooms_load_without_torch():
    """Whatever they import, in whichever library, does not bring it in either."""
    light = [path for path in FILES if place(path).startswith(LIGHT) or place(path) in LIGHT_FILES]
    assert len(light) > 2
    names = [
        ".".join(("asymgrpo", *path.relative_to(HOME).with_suffix("").parts)) for path in light
    ]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("_server")]
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
"""
    run_python(code)
