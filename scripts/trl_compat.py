"""TRL's own GRPO tests with its classes and with ours, and a table of every difference.

    python scripts/trl_compat.py /path/to/a/checkout/of/trl

The installed TRL is what is tested; the checkout lends its tests. Models come from
`trl_compat_models.py`, so nothing is downloaded. Ends with exit code 1 if a test that passes with
TRL's classes fails with ours for a reason that is not a refusal stated below.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from trl_compat_models import make_all, small_ids

STOCK = "from trl import GRPOConfig, GRPOTrainer\n"
OURS = (
    "from asymgrpo.training.trl import AsymGRPOConfig as GRPOConfig\n"
    "from asymgrpo.training.trl import AsymGRPOTrainer as GRPOTrainer\n"
)
REFUSALS = {
    r"ValueError: loss_type='vespo' is none of our objectives": (
        "refused: VESPO weights a rollout by a gamma density, which is none of our pieces; "
        "the error says what to use"
    ),
}
"""What an error of ours says, and why it stands. Nothing else may differ from TRL."""
PLUGIN = """
import importlib
import importlib.util
import re


def availability(name):
    package = re.fullmatch(r"is_(\\w+)_available", name)
    if package is None:
        raise AttributeError(name)
    return lambda: importlib.util.find_spec(package[1]) is not None


importlib.import_module("trl.import_utils").__getattr__ = availability
config = importlib.import_module("trl.trainer.base_config")._BaseConfig
prepare = config.__post_init__


def prepare_in_float32(self):
    self.bf16 = bool(self.bf16)
    prepare(self)


config.__post_init__ = prepare_in_float32
"""
"""Lets the tests of another version ask the installed TRL for checks that it no longer has, and
trains in float32 where a test leaves the precision open: bfloat16 is slow on a CPU."""


class Outcome(NamedTuple):
    result: str
    """passed | failed | skipped"""
    message: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of TRL, for its tests")
    parser.add_argument("-k", dest="select", default="", help="only tests that match, as in pytest")
    parser.add_argument("--work", type=Path, help="keep models and results in this folder")
    parser.add_argument("--processes", type=int, default=1, help="how many tests run at once")
    parser.add_argument("--reuse", choices=["stock"], help="take TRL's results from --work as is")
    chosen = parser.parse_args()
    if not (chosen.checkout / "tests" / "test_grpo_trainer.py").is_file():
        parser.error(f"{chosen.checkout} holds no tests/test_grpo_trainer.py; clone TRL there")
    with tempfile.TemporaryDirectory() as temporary:
        work = (chosen.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        make_all(work, chosen.checkout.resolve())
        results = {}
        for name, imports in {"stock": STOCK, "ours": OURS}.items():
            if chosen.reuse != name:
                options = ["-k", chosen.select] if chosen.select else []
                options += ["-n", str(chosen.processes)] if chosen.processes > 1 else []
                run_tests(work, chosen.checkout.resolve(), name, imports, options)
            results[name] = read_results(work / f"{name}.xml")
    return report(results["stock"], results["ours"])


def run_tests(work: Path, checkout: Path, name: str, imports: str, options: list[str]) -> None:
    """A copy of TRL's tests whose classes are ours or its own, run from `work`."""
    place = work / name
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(checkout / "tests", place / "tests")
    module = place / "tests" / "test_grpo_trainer.py"
    text = module.read_text(encoding="utf-8")
    if STOCK not in text:
        raise SystemExit(f"the tests of {checkout} import GRPOTrainer in another way than expected")
    module.write_text(small_ids(text.replace(STOCK, imports)), encoding="utf-8")
    (place / "trl_compat_plugin.py").write_text(PLUGIN, encoding="utf-8")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]),
        "HF_HOME": str(work / "cache"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "pytest", str(module), "-q", "--tb=short", "-p", "no:warnings"]
    command += ["-p", "trl_compat_plugin", "-p", "no:cacheprovider"]
    command += [f"--rootdir={place}", f"--junitxml={work / name}.xml", *options]
    print(f"running TRL's tests, {name}", flush=True)
    with (work / f"{name}.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=work, env=environment, stdout=log, stderr=log, check=False)


def read_results(path: Path) -> dict[str, Outcome]:
    """Test to outcome; a failure's message is the exception's own line."""
    results = {}
    for case in ElementTree.parse(path).iter("testcase"):
        kinds = {child.tag: child for child in case}
        name = f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"
        fault = kinds.get("failure", kinds.get("error"))
        if fault is not None:
            results[name] = Outcome("failed", fault.get("message", ""))
        elif "skipped" in kinds:
            results[name] = Outcome("skipped", kinds["skipped"].get("message", ""))
        else:
            results[name] = Outcome("passed", "")
    return results


def reason(message: str) -> str | None:
    """Why a failure of ours stands, if its error is a stated refusal."""
    for pattern, why in REFUSALS.items():
        if re.search(pattern, message):
            return why
    return None


def report(stock: dict[str, Outcome], ours: dict[str, Outcome]) -> int:
    """Print the table; the exit code is 1 if a difference has no stated reason."""
    for name, results in (("TRL's classes", stock), ("ours", ours)):
        counts = Counter(outcome.result for outcome in results.values())
        listed = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
        print(f"{name}: {listed} of {len(results)}")
    unexplained = 0
    rows = []
    for name, theirs in stock.items():
        mine = ours.get(name, Outcome("missing", ""))
        if theirs.result == mine.result:
            continue
        first = mine.message.splitlines()[0] if mine.message else ""
        why = reason(mine.message) if theirs.result == "passed" else None
        if theirs.result == "passed" and why is None:
            unexplained += 1
            why = f"NO STATED REASON: {first}"
        rows.append((name, theirs.result, mine.result, why or first or "-"))
    if rows:
        width = max(len(row[0]) for row in rows)
        print(f"{'test':{width}}  stock    ours     reason")
        for name, theirs_result, ours_result, why in rows:
            print(f"{name:{width}}  {theirs_result:7}  {ours_result:7}  {why}")
    print(f"{len(rows)} differences, {unexplained} without a stated reason")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
