"""Puts new rows through the parties of a finished run, defenses included, and reports what crossed and who saw it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from splitfed.core.errors import InvalidInput, unknown
from splitfed.core.grouping import group_pairs, total_pairs
from splitfed.core.messages import Recorder
from splitfed.core.random import derive
from splitfed.core.tasks import Task
from splitfed.core.topology import Head
from splitfed.core.traffic import Flow
from splitfed.data.from_python import RowType
from splitfed.study.report.units import count_noun, format_bytes
from splitfed.study.run.input_rows import check_kind, read_rows
from splitfed.study.run.progress import Lines
from splitfed.study.run.reattack import load_finished_run
from splitfed.study.run.runner import Json, train_cell
from splitfed.training.checkpoint import write_atomic
from splitfed.training.run import Run

SHOWN = 10
"""Rows that are printed where no file is asked for."""


def predict(
    folder: Path,
    rows: Path,
    client: int = 0,
    head: str | None = None,
    output: Path | None = None,
    view: str | None = None,
    view_output: Path | None = None,
    *,
    standardized: bool = False,
    trust: bool = False,
) -> Json:
    """Predict the rows in the file `rows` with the run in `folder`; return predictions, traffic and views.

    `client`: whose parties compute, from 0; `head`: whose output (default: the first). `output`: a CSV file for the
    predictions; `view_output`: a safetensors file for all that the party `view` received. `standardized`: whether the
    rows are standardised as those of the run's data are; a run on such data predicts no others. `trust`: whether a run
    that reaches outside of its folder may do so though it is not this user's own. Everything is checked before anything
    is computed or written: raises `InvalidInput`.
    """
    check_kind(rows)
    for path in filter(None, (output, view_output)):
        _check_writable(path, rows)
    _, cell, data = load_finished_run(folder, trust=trust)
    run, source = train_cell(cell, data, folder, Lines(1)), cell.config["data"]
    _check_standardized(standardized, bool(source.get("standardize", False)))
    table = source if source["name"] in ("csv", "parquet") else {}
    known = run.data.victims
    kind: RowType = "int64" if known.discrete else "float32"
    x = read_rows(
        rows,
        run.data.shape,
        known.value_range,
        kind,
        known.features,
        known.columns,
        known.categories,
        [name for name in (table.get("target"), table.get("domain"), *table.get("drop", ())) if name],
        table.get("separator", ","),
    )
    heads = {h.value: h for h in run.engine.topology.heads}
    if head is not None and head not in heads:
        raise unknown("head", head, heads)
    if not 0 <= client < run.engine.replicas:
        raise InvalidInput(f"client={client} is not allowed; expected 0 to {run.engine.replicas - 1}")
    if view is not None and view not in run.engine.parties:
        raise unknown("party", view, run.engine.parties)
    before = _predict_flows(run)
    with ExitStack() as recorder_stack:
        recorders = {name: recorder_stack.enter_context(run.engine.record_party(name)) for name in run.engine.parties}
        outputs = run.predict(x, client=client, head=head, number=_draw_number(run, x))
    chosen_head = heads[head] if head is not None else next(iter(heads.values()))
    predictions = prediction_table(chosen_head, outputs)
    if output is not None:
        write_atomic(output, _format_csv(predictions).encode())
    if view is not None and view_output is not None:
        received = recorders[view].view().tensors(dataless=True)
        write_atomic(view_output, save({name: tensor.contiguous() for name, tensor in received.items()}))
    return {
        "run": str(folder),
        "client": client,
        "head": chosen_head.value,
        "rows": len(x),
        "standardized": standardized,
        "predictions": predictions,
        **_predict_traffic(run, before),
        "views": {name: views for name, recorder in recorders.items() if (views := _list_views(recorder))},
        "output": None if output is None else str(output),
        "view_output": None if view_output is None else str(view_output),
    }


def prediction_table(head: Head, outputs: Tensor) -> dict[str, list[Any]]:
    """Return column -> values for `outputs` (rows, ...) of `head`.

    Of a classification the label and the probability of each class, of a binary task the label and the probability
    of 1, of anything else the values as they are.
    """
    task = head.task
    assert isinstance(task, Task)
    flat = outputs.double().reshape(len(outputs), -1)
    match task.name:
        case "classification":
            chances = flat.softmax(1)
            columns = {f"probability_{i}": chances[:, i].tolist() for i in range(chances.shape[1])}
            return {"label": chances.argmax(1).tolist(), **columns}
        case "binary":
            return {"label": (flat[:, 0] > 0).long().tolist(), "probability": flat[:, 0].sigmoid().tolist()}
    return {f"value_{i}": flat[:, i].tolist() for i in range(flat.shape[1])}


def format_prediction(prediction: Json) -> str:
    """Return what `predict` found as text for people."""
    lines = []
    if prediction["output"] is None:
        shown = {name: values[:SHOWN] for name, values in prediction["predictions"].items()}
        lines += _format_csv(shown, digits=4).splitlines()
        if prediction["rows"] > SHOWN:
            lines.append(f"... {prediction['rows'] - SHOWN} more rows; --output FILE.csv has them all")
    else:
        rows = count_noun(prediction["rows"], "row")
        lines.append(f"{rows} predicted by client {prediction['client']}: {prediction['output']}")
    kinds = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in prediction["bytes_by_kind"].items())
    messages, size = count_noun(prediction["messages"], "message"), format_bytes(prediction["bytes"])
    lines += [
        f"crossed: {messages}, {size} ({kinds or 'nothing'})",
        *(
            f"{party} saw {view['value']} ({view['kind']}, {'x'.join(map(str, view['shape']))}) from {view['from']}, "
            f"over {view['edge']}"
            for party, views in prediction["views"].items()
            for view in views
        ),
    ]
    if not prediction["views"]:
        lines.append("nobody saw anything: no value crosses in this topology")
    if prediction["view_output"] is not None:
        lines.append(f"view: {prediction['view_output']}")
    return "\n".join(lines)


def _check_standardized(given: bool, wanted: bool) -> None:
    """Refuse rows that are not said to be standardised where those of the run were, and the other way round."""
    if wanted and not given:
        raise InvalidInput(
            "the data of this run were standardised (standardize = true); give each numeric column less its mean, "
            "divided by its standard deviation, both over all rows of the run's data file, and say so with "
            "--standardized"
        )
    if given and not wanted:
        raise InvalidInput(
            "--standardized is for runs on standardised data; those of this run are as their file has them"
        )


def _draw_number(run: Run, x: Tensor) -> int:
    """Return the number of the call, by which defenses draw: the same rows the same draw, other rows another.

    Two calls that shared their noise would give away the difference of their releases.
    """
    return derive(run.seed, "predict", hashlib.sha256(x.numpy().tobytes()).hexdigest())


def _check_writable(path: Path, rows: Path) -> None:
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise InvalidInput(f"{str(path)!r} is no file that can be written; expected one in a folder that is there")
    if path.resolve() == rows.resolve():
        raise InvalidInput(f"{str(path)!r} is the input; give another file for what comes out")


def _predict_flows(run: Run) -> dict[Flow, tuple[int, int]]:
    return {flow: counted for flow, counted in run.engine.traffic.flows.items() if flow.phase == "predict"}


def _predict_traffic(run: Run, before: Mapping[Flow, tuple[int, int]]) -> Json:
    """Return messages and bytes of phase "predict" since `before`."""
    now = [(flow.kind, counted, before.get(flow, (0, 0))) for flow, counted in _predict_flows(run).items()]
    nbytes = total_pairs((kind, counted[1] - earlier[1]) for kind, counted, earlier in now)
    messages = sum(counted[0] - earlier[0] for _, counted, earlier in now)
    return {"messages": messages, "bytes": sum(nbytes.values()), "bytes_by_kind": dict(sorted(nbytes.items()))}


def _list_views(recorder: Recorder) -> list[Json]:
    """Return what one party received: each value with its whole shape, sender and edge."""
    tensors_by_message = group_pairs(
        ((value, message.kind, message.sender, message.edge), tensor)
        for message in recorder.view().messages
        for value, tensor in message.tensors.items()
    )
    return [
        {
            "value": value,
            "kind": kind,
            "from": sender,
            "edge": edge,
            "shape": [sum(len(t) for t in tensors), *tensors[0].shape[1:]],
            "bytes": sum(t.nbytes for t in tensors),
        }
        for (value, kind, sender, edge), tensors in tensors_by_message.items()
    ]


def _format_csv(table: dict[str, list[Any]], digits: int = 17) -> str:
    lines = [",".join(["row", *table])]
    lines += [
        ",".join([str(i), *(str(v) if isinstance(v, int) else f"{v:.{digits}g}" for v in row)])
        for i, row in enumerate(zip(*table.values(), strict=True))
    ]
    return "\n".join(lines) + "\n"
