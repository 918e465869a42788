"""`portakv info`, `check`, `compile`, `prove` and `run`: what was chosen here and why, if its bytes are right, what
kernels compile to and where they reach, and a model on a pool.

Results go to stdout, progress and errors to stderr. Exit code 1 is a mismatch, 2 a command that cannot run.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from portakv import check as conformance
from portakv import compare, dispatch
from portakv import compile as compilation
from portakv import costs as costing
from portakv.arguments import as_int
from portakv.check import Outcome
from portakv.compare import Comparison
from portakv.device import Device
from portakv.errors import DeviceUnavailable, PortaKVError
from portakv.formats import list_variants
from portakv.layers import LayerSpec, layers_from_config

app = typer.Typer(
    help="One KV-cache pool for hybrid models, with the same bytes on every device.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_out = Console()
_err = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
_NAMES = ", ".join(known.name for known in dispatch.DEVICES)
DeviceName = Annotated[str | None, typer.Option("--device", help=f"{_NAMES}, or a torch device such as cuda:1.")]


@app.command()
def info(as_json: AsJson = False) -> None:
    """Show what was probed, which kernel serves each op, and why every other one does not."""
    with _one_line_errors():
        facts = dispatch.facts()
        chosen = dispatch.select_all(facts) | dispatch.select_host()
    if as_json:
        _print_json(
            {
                "device": dispatch.CHOSEN.name,
                "arch": facts.arch,
                "name": facts.name,
                "features": sorted(facts.features),
                "versions": _versions(),
                "probed": [{"kind": p.device.name, "count": p.count, "reason": p.reason} for p in dispatch.probe()],
                "kernels": {op: selection.row.name for op, selection in chosen.items()},
                "proof": {op: selection.row.proof for op, selection in chosen.items()},
                "rejected": {op: {row.name: why for row, why in s.rejected} for op, s in chosen.items()},
            }
        )
        return
    _print_header(f"{facts.name or facts.arch} ({', '.join([facts.arch, *sorted(facts.features)])})")
    probed = _table("Devices", "kind", "found", "what was probed")
    for p in dispatch.probe():
        mark = "  ← chosen" if p.device is dispatch.CHOSEN else ""
        probed.add_row(p.device.name, str(p.count), escape(p.reason) + mark)
    _out.print(probed)
    rows = _table("Kernels", "op", "row", "from; its bytes were", "not chosen, and why")
    rows.columns[0].min_width = max(map(len, chosen))
    for op, selection in chosen.items():
        why_not = "\n".join(f"{row.name}: {why}" for row, why in selection.rejected)
        rows.add_row(op, selection.row.name, f"{selection.row.origin}; {selection.row.proof}", escape(why_not))
    _out.print(rows)


@app.command()
def check(
    device_name: DeviceName = None,
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            metavar="NAME,…",
            help="Instead: compile for GPUs that need not be here, such as sm_90, gfx942 or pvc, and execute the code.",
        ),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="With --target: of the row movers every so many-th variant.")] = 1,
    jobs: Annotated[int | None, typer.Option(min=1, help="With --target: processes; by default one a core.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare every kernel of a device, or its compiled code, with the reference, bit for bit, and captured graphs."""
    if targets:
        if device_name is not None:
            _print_problem("expected --device or --target, got both")
            raise typer.Exit(2)
        _check_targets(",".join(targets).split(","), every, jobs, as_json)
        return
    with _one_line_errors():
        of, target, on = _find_device(device_name)
    outcomes = []
    with _progress() as bars:
        for outcome in bars.track(
            conformance.check_device(on), total=len(conformance.rows(on)), description="checking"
        ):
            outcomes.append(outcome)
    _report(outcomes, str(target), {"device": of.name, "versions": _versions()}, as_json)


def _check_targets(names: list[str], every: int, jobs: int | None, as_json: bool) -> None:
    with _one_line_errors():
        wanted = [compilation.Target.parse(name) for name in dict.fromkeys(names)]
        unavailable = {one.name: why for one in wanted if (why := one.unavailable()) is not None}
        able = [one for one in wanted if one.name not in unavailable]
        if able:
            # Needs Triton, as nothing else here does.
            from portakv.conformance import compiled

            unavailable |= {one.name: why for one in able if (why := compiled.unavailable(one)) is not None}
            able = [one for one in able if one.name not in unavailable]
        for name, why in unavailable.items():
            _print_problem(f"{name} was not executed: {why}")
        if not able:
            raise typer.Exit(2)
        with _progress() as bars:
            bar = bars.add_task("executing", total=None)
            outcomes = compiled.check_targets(
                able, every, jobs, lambda done, total: bars.update(bar, completed=done, total=total)
            )
    versions = _versions() | {"triton": compilation.triton_version()}
    where = (
        f"triton {versions['triton']}'s code for {', '.join(one.name for one in able)}, executed without the hardware"
    )
    _report(outcomes, where, {"versions": versions, "unavailable": unavailable}, as_json)
    if unavailable:
        raise typer.Exit(1)


def _report(outcomes: list[Outcome], where: str, facts: dict[str, Any], as_json: bool) -> None:
    passed = all(outcome.result != "failed" for outcome in outcomes)
    if as_json:
        shown = [dataclasses.asdict(outcome) for outcome in outcomes]
        _print_json(facts | {"passed": passed, "outcomes": shown})
    else:
        _print_header(where)
        _out.print(_outcomes_table(outcomes))
    if not passed:
        _err.print("mismatch: a kernel differs from the reference", style="bold red")
        raise typer.Exit(1)


@app.command("compile")
def compile_kernels(
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,…",
            help=f"Such as {', '.join(compilation.TARGETS)}. Without it: all of these that this Triton compiles for.",
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", metavar=compilation.FORMAT_SYNTAX, help="A layer's format; give several for a pool."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", exists=True, help="A checkpoint whose layers' formats are compiled."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="The storage dtype of a pool for the checkpoint.")] = "bfloat16",
    page_size: Annotated[int, typer.Option(min=1, help="The page size of that pool.")] = 1,
    markdown: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, help="A page whose table of targets is brought up to date."),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A table of what each variant costs, made or brought up to date."),
    ] = None,
    check_costs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, help="Such a table, which no variant may exceed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile every kernel variant for GPUs that need not be here, into Triton's cache, and inspect the code."""
    with _one_line_errors():
        names = ",".join(target or compilation.TARGETS).split(",")
        wanted = [compilation.Target.parse(name) for name in dict.fromkeys(names)]
        chosen = [compilation.parse_format(text) for text in formats or ()]
        if model is not None:
            chosen += compilation.model_formats(_checkpoint_layers(model), dtype, page_size)
        chosen = chosen or list(compilation.FORMATS)
        unavailable = {one.name: why for one in wanted if (why := one.unavailable()) is not None}
        for name, why in unavailable.items():
            _print_problem(f"{name} was not compiled: {why}")
        able = [one for one in wanted if one.name not in unavailable]
        if not able:
            raise typer.Exit(2)
        # Before anything is compiled, a table that is none.
        made_by, limits = costing.read_costs(check_costs.read_text()) if check_costs else ("", {})
        with _progress() as bars:
            task = bars.add_task("compiling", total=len(able) * len(list_variants(chosen)))
            reports = compilation.compile_all(able, chosen, functools.partial(bars.advance, task))
        summary = list(compilation.summarize(reports))
        exceeded = list(costing.check_costs(limits, reports, made_by == compilation.triton_version()))
        if costs is not None and all(report.ok for report in reports):
            costs.write_text(costing.update_costs(costs.read_text() if costs.exists() else "", reports))
        if markdown is not None:
            markdown.write_text(compilation.update_table(markdown.read_text(), summary))
    if as_json:
        _print_json(
            {
                "versions": _versions() | {"triton": compilation.triton_version()},
                "unavailable": unavailable,
                "kernels": [{**dataclasses.asdict(report), "ok": report.ok} for report in reports],
            }
        )
    else:
        shown = _table("Compiled variants (docs/kernels.md says what each column is)", *compilation.COLUMNS)
        for row in summary:
            shown.add_row(*row)
        _out.print(shown)
    for report in reports:
        for problem in report.problems:
            _print_problem(f"{report.target} {report.op} {report.variant}: {problem}")
    if check_costs is not None and made_by != compilation.triton_version():
        other = f"{check_costs} is Triton {made_by}'s, this is {compilation.triton_version()}"
        _print_problem(f"{other}: only that nothing spills was checked")
    for problem in exceeded:
        _print_problem(f"{check_costs}: {problem}")
    if exceeded or not all(report.ok for report in reports) or (target and unavailable):
        raise typer.Exit(1)


@app.command()
def prove(
    target: Annotated[str, typer.Option(metavar="NAME,…", help="What compile takes.")] = "sm_90",
    conformance: Annotated[
        bool, typer.Option("--all", help="Also for the formats of the conformance cases, ten times as many kernels.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Prove of every kernel that it stays inside its tensors and writes no byte twice, whatever the slots are."""
    with _one_line_errors():
        try:
            from portakv.conformance.prove import kernels
        except ModuleNotFoundError as e:
            if e.name != "z3":
                raise
            raise PortaKVError("proofs need z3: pip install 'portakv[prove]'") from None
        wanted = [compilation.Target.parse(name) for name in dict.fromkeys(target.split(","))]
        for one in wanted:
            if (why := one.unavailable()) is not None:
                raise PortaKVError(f"{one.name} cannot be compiled for: {why}")
        variants = kernels.all_variants(conformance)
        found = {}
        with _progress() as bars:
            task = bars.add_task("proving", total=len(wanted) * len(variants))
            for one in wanted:
                found[one.name] = list(kernels.prove_all(one, variants, functools.partial(bars.advance, task)))
    results = [(name, result) for name, of in found.items() for result in of]
    if as_json:
        versions = _versions() | {"triton": compilation.triton_version()}
        shown = [{"target": name, **dataclasses.asdict(result)} for name, result in results]
        _print_json({"versions": versions, "kernels": shown})
    else:
        table = _table("Proofs (docs/kernels.md says of what)", "target", "op", "variants", "proved", "not proved")
        for name, of in found.items():
            for op in dict.fromkeys(result.op for result in of):
                mine = [result for result in of if result.op == op]
                counts = (sum(len(r.variants) for r in mine), sum(r.proved for r in mine))
                table.add_row(name, op, *map(str, counts), str(sum(len(r.problems) for r in mine)))
        _out.print(table)
    for name, result in results:
        for problem in result.problems:
            _print_problem(f"{name} {result.op} {result.variants[0]}: {problem}")
    if any(result.problems for _, result in results):
        raise typer.Exit(1)


@app.command()
def run(
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="A local checkpoint. Without it: scaled-down GPT-OSS, Gemma 3 and MiMo-V2, random weights.",
        ),
    ] = None,
    device_name: DeviceName = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; give several for a batch.", show_default=False)
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate after each prompt, at least 3.")] = 112,
    as_json: AsJson = False,
) -> None:
    """Generate greedily through a pool and through the model's own cache, and compare what comes out."""
    _require_transformers()
    with _one_line_errors():
        new_tokens = as_int("--new-tokens", new_tokens, 3)
        of, target, on = _find_device(device_name)
        prompts = prompt or compare.PROMPTS
        if model is None:
            names, subjects = list(compare.SCALED), compare.scaled_subjects(target, prompts)
        else:
            names, subjects = [model.name], iter([compare.local_subject(model, target, prompts)])
    results = []
    with _one_line_errors(), _progress() as bars:
        tasks = [bars.add_task(name, total=2 * new_tokens) for name in names]
        for task, subject in zip(tasks, subjects, strict=True):
            results.append(compare.compare(subject, new_tokens, functools.partial(bars.advance, task), on))
    kernels = {op: ", ".join(dict.fromkeys(r.kernels[op] for r in results)) for op in results[0].kernels}
    store_rate, copy_rate = compare.measure_store(on)
    if as_json:
        _print_json(
            {
                "device": of.name,
                "versions": _versions(),
                "models": [_finite(dataclasses.asdict(result)) for result in results],
                "kernels": kernels,
                "store_gb_per_s": store_rate,
                "copy_gb_per_s": copy_rate,
            }
        )
    else:
        _print_header(str(target))
        _out.print(_results_table(results))
        rows = _table("Kernels of these pools", "op", "row")
        for op, row in kernels.items():
            rows.add_row(op, row)
        _out.print(rows)
        rates = f"store_kv at random slots {store_rate:.1f} GB/s, plain copies {copy_rate:.1f} GB/s"
        _out.print(f"{rates} (read + write)")
    if not all(result.matches for result in results):
        _err.print("mismatch: the pool and the model's own cache disagree", style="bold red")
        raise typer.Exit(1)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """What a user can mend ends the command with its message; anything else keeps its traceback."""
    try:
        yield
    except (PortaKVError, ValueError, OSError) as e:
        _print_problem(" ".join(str(e).split()))
        raise typer.Exit(2) from None


def _require_transformers() -> None:
    try:
        from transformers.utils import logging as transformers_logging
    except ModuleNotFoundError as e:
        if e.name != "transformers":
            raise
        _err.print("portakv: a model needs transformers: pip install 'portakv[run]'", markup=False)
        raise typer.Exit(2) from None
    logging: Any = transformers_logging  # its functions have no types
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _checkpoint_layers(directory: Path) -> list[LayerSpec]:
    _require_transformers()
    from transformers import AutoConfig

    config: Any = AutoConfig  # its methods have no types
    return layers_from_config(config.from_pretrained(directory))


def _find_device(name: str | None) -> tuple[Device, torch.device, Device | torch.device]:
    """A device by its name or torch's, once it holds a number, and which of both a pool must be given."""
    of, target = dispatch.resolve(name)
    try:
        torch.zeros(1, device=target).item()
    except (AssertionError, ImportError, RuntimeError) as e:  # meta, or what this torch is not built for
        why = str(e).partition(". ")[0].partition("\n")[0]
        raise DeviceUnavailable(f"{target}: expected a device with memory, got none: {why}") from e
    return of, target, target if dispatch.device_of(target) is of else of


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=_err, transient=True, disable=not _err.is_terminal)


def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("portakv")
    except importlib.metadata.PackageNotFoundError:
        own = "(source tree)"
    return {"portakv": own, "torch": str(torch.__version__), "python": platform.python_version()}


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` with null for what JSON has no number for: differences of logits that are NaN or infinite."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in fields.items()}


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2))


def _print_problem(what: str) -> None:
    """One line, however long."""
    _err.print(f"portakv: {what}", style="red", markup=False, highlight=False, soft_wrap=True)


def _print_header(where: str) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    _out.print(f"{versions} on {where}", markup=False, highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column)
    return table


def _outcomes_table(outcomes: list[Outcome]) -> Table:
    table = _table(
        "Kernels beside the reference, bit for bit", "op", "row", "result", "cases", "first difference, or why not run"
    )
    for o in outcomes:
        result = "[bold red]FAILED[/]" if o.result == "failed" else o.result
        table.add_row(o.op, o.row, result, f"{o.cases} of {o.total}" if o.total else "–", escape(o.detail))
    return table


def _results_table(results: list[Comparison]) -> Table:
    """One column per model: there are more figures than models."""
    table = _table("Generation through the pool, and through the model's own cache", "")
    for r in results:
        table.add_column(escape(r.name), justify="right", overflow="fold")
    for label, cells in {
        "identical tokens": ["yes" if r.tokens_identical else "[bold red]NO[/]" for r in results],
        "largest logit difference": [f"{r.max_logit_diff:.1e}" for r in results],
        "  rounding tolerance": [f"{r.logit_tolerance:.1e}" for r in results],
        "layers, full + SWA": [f"{r.full_layers} + {r.swa_layers}" for r in results],
        "batch × new tokens": [f"{r.batch} × {r.new_tokens}" for r in results],
        "window, times passed": [f"{r.window or '–'}, {r.windows_passed:.1f}" for r in results],
        "decode tokens/s, pool": [f"{r.tokens_per_s_pool:.1f}" for r in results],
        "decode tokens/s, own cache": [f"{r.tokens_per_s_own:.1f}" for r in results],
        "bytes held, pool": [f"{r.bytes_held_pool:,}" for r in results],
        "bytes held, own cache": [f"{r.bytes_held_own:,}" for r in results],
        "SWA slots held, at most": [f"{r.swa_slots_held}, {r.swa_slots_bound}" for r in results],
    }.items():
        table.add_row(label, *cells)
    return table
