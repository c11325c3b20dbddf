"""`automodel embeddings`: find damaged rows of a stored input embedding, and write a repaired copy of the model."""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel.cli.complaints import complain

if TYPE_CHECKING:
    from automodel.checkpoint.embedding_diagnosis import EmbeddingDiagnosis
    from automodel.checkpoint.embedding_files import EmbeddingFiles, StoredMatrix

__all__ = ["add_arguments", "run"]

_DAMAGED = 1
_USAGE_ERROR = 2
_UNREADABLE = 3
_MOST_LISTED = 256
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
_ZERO_ROWS = (
    "An exactly zero row is not damaged where it belongs to pad_token_id of config.json (training goes by padding_idx "
    "of the embedding module), or to no token of the tokenizer."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `embeddings inspect` and `embeddings repair`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    text = "show how the row norms of the input embedding are spread, and which rows are damaged"
    inspect = actions.add_parser(
        "inspect",
        help=text,
        description=f"{text[0].upper()}{text[1:]}. {_ZERO_ROWS}",
        epilog="Exit status: 0 healthy, 1 damaged rows, 2 a mistake in the command or a result that cannot be written, "
        "3 a file cannot be read.",
        allow_abbrev=False,
    )
    text = "write a copy of the model in which damaged rows are replaced"
    repair = actions.add_parser(
        "repair",
        help=text,
        description=f"{text[0].upper()}{text[1:]}: by the output embedding's rows, scaled to the norm of healthy rows. "
        f"{_ZERO_ROWS}",
        epilog="Exit status: 0 done, 1 refused or failed, 2 a mistake in the command, 3 a file cannot be read.",
        allow_abbrev=False,
    )
    for action in (inspect, repair):
        action.add_argument("path", metavar="PATH", type=Path, help="a model folder, or one .safetensors file")
        action.add_argument(
            "--min-norm",
            type=float,
            metavar="X",
            help="a row with an L2 norm up to X is damaged (default: a value inside the clearest gap, else 1e-6)",
        )
    inspect.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    inspect.add_argument("--plot", type=Path, metavar="FILE.svg", help="also draw the histogram as SVG")
    repair.add_argument("--out", type=Path, metavar="DIR", required=True, help="the folder of the copy, a new one")
    repair.add_argument(
        "--max-rows", type=int, metavar="N", help="refuse to replace more rows than N (default: 256)", default=256
    )
    repair.add_argument(
        "--target",
        choices=("rms", "median"),
        default="rms",
        help="norm of the new rows: that of healthy rows in the root mean square (default), or their median",
    )


def run(args: argparse.Namespace) -> int:
    """Inspect or repair; returns the exit status."""
    from automodel.checkpoint.embedding_files import UnreadableModelError
    from automodel.checkpoint.embedding_repair import RepairRefusedError

    try:
        return _inspect(args) if args.action == "inspect" else _repair(args)
    except BrokenPipeError:
        raise
    except UnreadableModelError as error:
        return _complain(error, status=_UNREADABLE)
    except RepairRefusedError as error:
        return _complain(error, status=_DAMAGED)
    except ValueError as error:
        return _complain(error, status=_USAGE_ERROR)
    except (OSError, RuntimeError) as error:
        # To inspect, 1 would say that the model is damaged.
        return _complain(error, status=_USAGE_ERROR if args.action == "inspect" else _DAMAGED)
    except KeyboardInterrupt:
        return complain(KeyboardInterrupt("interrupted"), status=130, with_traceback=None)


def _complain(error: Exception, *, status: int) -> int:
    """Print an error, whose text may hold names from files."""
    from automodel.checkpoint.embedding_files import printable

    text = printable(str(error)) or type(error).__name__
    return complain(ValueError(text), status=status, with_traceback=None)


def _print(lines: Iterable[str]) -> None:
    """Print lines, which may hold names from files."""
    from automodel.checkpoint.embedding_files import printable

    print("\n".join(printable(line) for line in lines))


def _inspect(args: argparse.Namespace) -> int:
    from automodel.checkpoint.embedding_diagnosis import read_output_norms
    from automodel.checkpoint.embedding_files import find_embeddings

    _check(args, max_rows=1)
    diagnosis, tokens = _diagnose(find_embeddings(args.path), min_norm=args.min_norm)
    output_norms = read_output_norms(diagnosis)
    if args.plot is not None:
        _plot(diagnosis, args.plot)
    if args.json:
        print(json.dumps(_as_json(diagnosis, output_norms, tokens), indent=2, allow_nan=False))
    else:
        _print(_report_lines(diagnosis, output_norms, tokens))
    return _DAMAGED if diagnosis.damaged_ids else 0


def _repair(args: argparse.Namespace) -> int:
    from automodel.checkpoint.embedding_files import find_embeddings, printable
    from automodel.checkpoint.embedding_repair import check_output_folder, repair_on_disk
    from automodel.observe.byte_progress import ByteProgress

    _check(args, max_rows=args.max_rows)
    found = find_embeddings(args.path)
    check_output_folder(found, args.out)
    diagnosis, _ = _diagnose(found, min_norm=args.min_norm)
    with ByteProgress(sys.stderr, f"writing {printable(str(args.out))}") as progress:
        report = repair_on_disk(
            diagnosis,
            args.out,
            max_rows=args.max_rows,
            target=args.target,
            on_total=progress.expect,
            on_bytes=progress.advance,
        )
    if report.written_file is None:
        lines = [f"{found.input.key} has no damaged rows: {_threshold_text(diagnosis)}"]
    else:
        ids = list(report.repaired_row_ids)
        lines = [f"repaired {len(ids)} rows of {found.input.key}, norm {report.target_norm:.4g} now: {ids}"]
        lines.append(f"  {_threshold_text(diagnosis)}")
    written = "" if report.written_file is None else f"{report.written_file.name} written anew, "
    _print([*lines, f"{report.folder}: {written}{report.linked} linked, {report.copied} copied"])
    return 0


def _check(args: argparse.Namespace, *, max_rows: int) -> None:
    """Refuse a threshold or a bound that makes no sense before anything is read."""
    from automodel.models.embedding_rows import DEFAULT_MIN_NORM, check_limits

    check_limits(min_norm=DEFAULT_MIN_NORM if args.min_norm is None else args.min_norm, max_rows=max_rows)


def _diagnose(found: "EmbeddingFiles", *, min_norm: float | None) -> "tuple[EmbeddingDiagnosis, dict[int, str]]":
    """Read the input embedding and judge it; also return the text of the damaged tokens, where a tokenizer is there."""
    from automodel.checkpoint.embedding_diagnosis import diagnose
    from automodel.checkpoint.embedding_files import printable, read_squared_norms
    from automodel.observe.byte_progress import ByteProgress

    with ByteProgress(sys.stderr, f"reading {printable(found.input.key)}", total=found.input.num_bytes) as progress:
        squared_norms = read_squared_norms(found.input, on_bytes=progress.advance)
    diagnosis = diagnose(found, squared_norms, min_norm=min_norm)
    # A tokenizer takes longer to load than most embeddings take to read: only damaged rows are worth it.
    tokenizer = _load_tokenizer(found) if diagnosis.damaged_ids else None
    if tokenizer is None:
        return diagnosis, {}
    vocab_size = 1 + max(tokenizer.get_vocab().values(), default=-1)
    diagnosis = diagnose(found, squared_norms, min_norm=min_norm, vocab_size=vocab_size)
    return diagnosis, {
        row_id: _token_text(tokenizer, row_id) for row_id in diagnosis.damaged_ids if row_id < vocab_size
    }


def _load_tokenizer(found: "EmbeddingFiles") -> Any:
    """Load the tokenizer beside the weights; None where there is none or it cannot be loaded."""
    folder = found.folder or found.path.parent
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from automodel.checkpoint.embedding_files import printable
    from automodel.data.tokenizer import load_tokenizer

    try:
        return load_tokenizer(folder.resolve(), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - a border: a tokenizer only adds names to what is known already
        text = f"warning: the tokenizer in {folder} cannot be loaded: {' '.join(str(error).split())[:200]}"
        print(printable(text), file=sys.stderr)
        return None


def _token_text(tokenizer: Any, token_id: int) -> str:
    """The text of a token; its spelling in the vocabulary where it is part of a character only."""
    text = tokenizer.decode([token_id])
    return str(tokenizer.convert_ids_to_tokens(token_id)) if not text or "\ufffd" in text else text


def _report_lines(
    diagnosis: "EmbeddingDiagnosis", output_norms: dict[int, float], tokens: dict[int, str]
) -> Iterator[str]:
    from automodel.models.embedding_rows import count_norms
    from automodel.observe.norm_histograms import format_norm, norm_histogram_lines

    found, healthy, gap = diagnosis.embeddings, diagnosis.healthy, diagnosis.gap
    yield f"input embedding   {_matrix_text(found.input)}"
    if found.tied:
        yield "output embedding  tied to the input embedding"
    else:
        yield f"output embedding  {'none' if found.output is None else _matrix_text(found.output) + ', not tied'}"
    count = int(diagnosis.classes.healthy.sum())
    spread = (
        ""
        if healthy is None
        else "".join(
            f"  {name} {format_norm(value)}"
            for name, value in (
                ("min", healthy.min),
                ("median", healthy.median),
                ("rms", healthy.rms),
                ("max", healthy.max),
            )
        )
    )
    yield f"healthy rows      {count:,} of {len(diagnosis.norms):,}{spread}"
    if diagnosis.unused_ids:
        unused = len(diagnosis.unused_ids)
        yield f"unused rows       {unused:,} exactly zero: of padding, or beyond the tokenizer's vocabulary"
    histogram = count_norms(diagnosis.norms)
    yield ""
    yield from norm_histogram_lines(
        histogram.counts,
        first_edge=histogram.first_edge,
        bin_width=histogram.bin_width,
        zero=histogram.zero,
        nonfinite=histogram.nonfinite,
        limit=diagnosis.min_norm,
    )
    yield ""
    if gap is None:
        yield "clearest gap      none: no norm is 100 times the next smaller one"
    else:
        yield (
            f"clearest gap      {format_norm(gap.below)} to {format_norm(gap.above)}, {gap.rows_below:,} rows below, "
            f"suggests min_norm {format_norm(gap.min_norm)}"
        )
    yield f"threshold         {_threshold_text(diagnosis)}"
    yield from _damage_lines(diagnosis, output_norms, tokens)


def _damage_lines(
    diagnosis: "EmbeddingDiagnosis", output_norms: dict[int, float], tokens: dict[int, str]
) -> Iterator[str]:
    """The damaged rows one by one, and what can be done."""
    from automodel.checkpoint.embedding_repair import find_refusal
    from automodel.observe.norm_histograms import format_norm

    ids = diagnosis.damaged_ids
    if not ids:
        yield "damaged rows      none"
        return
    yield f"damaged rows      {len(ids):,}"
    yield ""
    shown = {row_id: json.dumps(tokens[row_id], ensure_ascii=True) for row_id in ids[:_MOST_LISTED] if row_id in tokens}
    width = max([len(text) for text in shown.values()] or [0])
    width = max(width, 5) if shown else 0
    yield f"{'id':>9}  {'norm':>9}  {'token':<{width}}  output row" if shown else f"{'id':>9}  {'norm':>9}  output row"
    for row_id in ids[:_MOST_LISTED]:
        token = f"{shown.get(row_id, ''):<{width}}  " if shown else ""
        state = _output_state(diagnosis, output_norms, row_id)
        yield f"{row_id:>9}  {format_norm(float(diagnosis.norms[row_id])):>9}  {token}{state}"
    if len(ids) > _MOST_LISTED:
        yield f"{'...':>9}  {len(ids) - _MOST_LISTED:,} more; --json lists all"
    yield ""
    max_rows = max(256, len(ids))
    if not all(_is_healthy(diagnosis, output_norms, row_id) for row_id in ids):
        yield "Not every damaged row has a healthy output row to be repaired from."
    elif refusal := find_refusal(diagnosis, max_rows=max_rows):
        yield f"They cannot be repaired: {refusal}."
    else:
        command = "automodel embeddings repair PATH --out DIR" + (f" --max-rows {max_rows}" if max_rows > 256 else "")
        yield f"Each has a healthy output row. '{command}' writes a repaired copy;"
        yield "in a recipe, this repairs the model after it is loaded:"
        yield "  embedding_row_repair:"
        yield f"    min_norm: {_yaml_number(diagnosis.min_norm)}"
        yield f"    max_rows: {max_rows}"


def _yaml_number(value: float) -> str:
    """Write a number with as many digits as give it back exactly, and with a point, without which YAML reads a text."""
    texts = (f"{value:.{digits}e}" for digits in range(1, 17))
    return next(text for text in texts if float(text) == value)


def _is_healthy(diagnosis: "EmbeddingDiagnosis", output_norms: dict[int, float], row_id: int) -> bool:
    norm = output_norms.get(row_id, math.nan)
    return math.isfinite(norm) and norm > diagnosis.min_norm


def _output_state(diagnosis: "EmbeddingDiagnosis", output_norms: dict[int, float], row_id: int) -> str:
    from automodel.observe.norm_histograms import format_norm

    if row_id not in output_norms:
        return "tied" if diagnosis.embeddings.tied else "none"
    state = "healthy" if _is_healthy(diagnosis, output_norms, row_id) else "damaged too"
    return f"{state} ({format_norm(output_norms[row_id])})"


def _matrix_text(matrix: "StoredMatrix") -> str:
    dtype = str(matrix.dtype).removeprefix("torch.")
    return f"{matrix.key}  [{matrix.shape[0]}, {matrix.shape[1]}] {dtype}, {matrix.file.name}"


def _threshold_text(diagnosis: "EmbeddingDiagnosis") -> str:
    from automodel.observe.norm_histograms import format_norm

    origin = {"given": "as given", "gap": "inside the clearest gap", "default": "the default"}[diagnosis.min_norm_from]
    return f"min_norm {format_norm(diagnosis.min_norm)}, {origin}"


def _plot(diagnosis: "EmbeddingDiagnosis", file: Path) -> None:
    from automodel.checkpoint.embedding_files import printable
    from automodel.models.embedding_rows import count_norms
    from automodel.observe.atomic_file import replace_file
    from automodel.observe.norm_histograms import norm_histogram_svg

    histogram, found = count_norms(diagnosis.norms, max_bins=60), diagnosis.embeddings
    svg = norm_histogram_svg(
        histogram.counts,
        first_edge=histogram.first_edge,
        bin_width=histogram.bin_width,
        zero=histogram.zero,
        nonfinite=histogram.nonfinite,
        limit=diagnosis.min_norm,
        title=printable(f"Row norms of {found.input.key} in {found.path.resolve().name}"),
    )
    try:
        replace_file(file, svg.encode())
    except OSError as error:
        raise ValueError(f"--plot {file} cannot be written: {error}") from error


def _as_json(diagnosis: "EmbeddingDiagnosis", output_norms: dict[int, float], tokens: dict[int, str]) -> dict[str, Any]:
    """The whole result; norms that are no finite numbers become null."""
    import dataclasses

    from automodel.models.embedding_rows import count_norms

    found = diagnosis.embeddings
    return {
        "path": str(found.path),
        "input_embedding": _matrix_json(found.input),
        "output_embedding": None if found.output is None else _matrix_json(found.output),
        "tied": found.tied,
        "min_norm": diagnosis.min_norm,
        "min_norm_from": diagnosis.min_norm_from,
        "gap": None if diagnosis.gap is None else dataclasses.asdict(diagnosis.gap),
        "healthy": {
            "rows": int(diagnosis.classes.healthy.sum()),
            **({} if diagnosis.healthy is None else dataclasses.asdict(diagnosis.healthy)),
        },
        "unused_row_ids": diagnosis.unused_ids,
        "histogram": dataclasses.asdict(count_norms(diagnosis.norms)),
        "damaged": [
            {
                "id": row_id,
                "norm": _finite(float(diagnosis.norms[row_id])),
                "token": tokens.get(row_id),
                "output_norm": _finite(output_norms.get(row_id, math.nan)),
                "output_healthy": _is_healthy(diagnosis, output_norms, row_id),
            }
            for row_id in diagnosis.damaged_ids
        ],
    }


def _matrix_json(matrix: "StoredMatrix") -> dict[str, Any]:
    dtype = str(matrix.dtype).removeprefix("torch.")
    return {"name": matrix.key, "file": str(matrix.file), "dtype": dtype, "shape": list(matrix.shape)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
