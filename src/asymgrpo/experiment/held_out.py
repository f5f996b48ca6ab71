"""A run's evaluations beside the data that they were made on: edited rows, other families."""

from __future__ import annotations

from collections.abc import Sequence

from asymgrpo.errors import UserError
from asymgrpo.evaluation.evaluate import cluster_of, row_key, summarize
from asymgrpo.experiment.settings import RunSettings
from asymgrpo.experiment.store import RunStore
from asymgrpo.tasks import Example, Task, load_task


def held_out_rows(task: Task, settings: RunSettings) -> list[Example]:
    """The problems that a run is measured on."""
    test = task.examples("test")
    return [test[index] for index in range(min(settings.eval_problems, len(test)))]


def refuse_edited_rows(store: RunStore, rows: Sequence[Example]) -> None:
    """Refuse to go on with a run whose problems are not those that it was measured on before."""
    known = {row_key(row) for row in rows}
    for record in store.evaluations():
        for problem in record["problems"]:
            if problem.get("row", next(iter(known))) not in known:
                raise UserError(
                    f"problem {problem['id']} of {record['task']} was edited since "
                    f"{store.folder} was evaluated at step {record['step']}; choose another "
                    "--out, or restore the data"
                )


def regroup(store: RunStore, settings: RunSettings) -> None:
    """Give what a run has measured the families that `settings` name, in metrics as well.

    Families change intervals alone, so that no run has to be trained again for them.
    """
    records = [r for r in store.evaluations() if r.get("cluster") != settings.cluster]
    if not records:
        return
    task = load_task(settings.task, path=settings.task_path, prompt=settings.prompt)
    rows = held_out_rows(task, settings)
    refuse_edited_rows(store, rows)
    by_key = {row_key(row): row for row in rows}
    for record in records:
        for problem in record["problems"]:
            problem.pop("cluster", None)
            if settings.cluster is not None:
                problem["cluster"] = cluster_of(by_key[problem["row"]], settings.cluster)
        metrics = summarize(record["problems"], record["k"])
        record["metrics"] = {name: estimate.as_dict() for name, estimate in metrics.items()}
        store.write_evaluation(record["step"], {**record, "cluster": settings.cluster})
    kept = store.run()["settings"]
    store.update_run(settings={**kept, "cluster": settings.cluster})
