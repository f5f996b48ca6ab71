"""Canaries of every kind of secret, and every byte of every file that a run leaves behind."""

from __future__ import annotations

import gzip
import io
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from runs import small

from asymgrpo import cli
from asymgrpo.experiment.run import train_run
from asymgrpo.experiment.store import RunStore
from asymgrpo.report import build_report
from asymgrpo.secrets import redacted

ENVIRONMENT = {
    "HF_TOKEN": "canary-0-of-the-hub",
    "WANDB_API_KEY": "canary-1-of-a-tracker",
    "AWS_SECRET_ACCESS_KEY": "canary-2-within-a-name",
    "MY_SECRET_SAUCE": "canary-3-within-a-name",
    "DATABASE_PASSWORD": "canary-4-of-a-database",
}
SETTINGS = {
    "hub_token": "canary-5-of-a-field",
    "model_init_kwargs": {
        "token": "canary-6-of-a-nested-field",
        "proxies": {"https": "http://user:canary-7-of-a-url@proxy:80"},
    },
    "run_name": "of {AWS_SECRET_ACCESS_KEY} and {MY_SECRET_SAUCE} and {DATABASE_PASSWORD}",
    "vllm_server_base_url": "https://canary-8-alone-in-a-url@host/path?api_key=canary-9-of-a-query",
    "trackio_space_id": "s3://key:canary-10@with-an-at@bucket/x",
}


def contents(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    """A file's bytes, and those of whatever is packed within it."""
    yield name, data
    if data[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for inner in archive.namelist():
                yield from contents(f"{name}/{inner}", archive.read(inner))
    elif data[:2] == b"\x1f\x8b":
        yield from contents(f"{name}.un", gzip.decompress(data))
    elif data[:4] == b"PAR1":
        yield f"{name}.rows", repr(pq.read_table(io.BytesIO(data)).to_pylist()).encode()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("canaries") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        trainer = {**SETTINGS, "run_name": str(SETTINGS["run_name"]).format(**ENVIRONMENT)}
        trainer |= {"save_steps": 1, "report_to": "tensorboard"}
        settings = small(steps=2, eval_every=2, eval_problems=2, eval_samples=2, trainer=trainer)
        train_run(settings, folder)
        train_run(settings, folder)  # the same run, though its record has no secret
        build_report([folder], folder / "report.html", figures=folder / "figures")
        words = ["evaluate", str(folder), "--problems", "2", "--samples", "2", "--k", "1"]
        patch.setattr(sys, "argv", ["asymgrpo", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
    return folder


def test_canaries_are_in_no_byte_of_a_run(run: Path) -> None:
    files = [path for path in run.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"run.json", "training_args.bin", "report.html", "optimizer.pt"} <= names
    assert any("tfevents" in name for name in names)
    assert any(path.suffix == ".parquet" for path in files)
    seen, found = 0, []
    for path in files:
        for name, data in contents(str(path.relative_to(run)), path.read_bytes()):
            seen += 1
            found += [name] if b"canary" in data else []
    assert seen > len(files)  # packed files were looked into
    assert not found
    assert "(redacted)" in (run / "run.json").read_text()


def test_a_page_of_an_older_folder_has_no_secret_either(run: Path, tmp_path: Path) -> None:
    """One whose record was written before a kind of secret was known."""
    store = RunStore(run)
    kept = store.run()
    store.write_run(kept | {"model": "https://me:canary@host/model"})
    try:
        page = build_report([run], tmp_path / "page.html", figures=tmp_path / "figures")
    finally:
        store.write_run(kept)
    for path in [page, *(tmp_path / "figures").iterdir()]:
        assert b"canary" not in path.read_bytes(), path


def test_what_is_no_secret_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRETS_DIR", str(tmp_path))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "arithmetic")
    plain = {
        "task": "arithmetic",
        "eos_token": "</s>",
        "task_path": f"{tmp_path}/data.jsonl",
        "model": "https://host/a@b/c?revision=main",
        "max_tokens": 5,
        "reward": ["file.py:reward"],
    }
    assert redacted(plain) == plain
