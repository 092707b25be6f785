"""`tierctl calibrate`: a model's calibration file, from a text."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from tierd.cli.ask import Ask, verb
from tierd.cli.figures import human_bytes, human_count
from tierd.cli.help import example
from tierd.cli.progress import shown_progress
from tierd.cli.render import facts, show_json
from tierd.codecs.fit import make
from tierd.errors import InvalidArgument
from tierd.quality.windows import WINDOWS, calibration_windows, read_text
from tierd.worker.checkpoint import open_checkpoint
from tierd.worker.sampling_kv import samples

TOKENS = 50_000


@click.command(epilog=example("tierctl calibrate models/tiny-llama text.txt --out tiny-llama.calibration"))
@click.argument("model", metavar="MODEL", type=click.Path(file_okay=False, path_type=Path))
@click.argument("text", metavar="TEXT", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--out", type=click.Path(dir_okay=False, writable=True, path_type=Path), required=True, help="File to write."
)
@click.option("--tokens", type=click.IntRange(1), default=TOKENS, show_default=True, help="Tokens of the text to use.")
@click.option(
    "--between-windows",
    "between",
    type=click.IntRange(0),
    default=WINDOWS,
    show_default=True,
    help="Spare the text of so many windows of `tierctl quality`; 0: spare none.",
)
@verb
def calibrate(ask: Ask, *, model: Path, text: Path, out: Path, **options: int) -> None:
    """Makes a calibration file of a model, which some codecs need.

    MODEL: a checkpoint folder of a Llama. TEXT: bytes for a model whose tokens are bytes, or token
    ids as .npy for any other. The model reads windows of 1,024 tokens from all parts of the text.

    Text that `tierctl quality --windows N` measures on the same file is spared if N is that of
    --between-windows; both have the same default. With torch installed the samples have the loss's
    gradients, and codecs are better; without it two substitutes stand in.
    """
    if not out.parent.is_dir():
        raise InvalidArgument(f"--out: the directory {out.parent} does not exist; create it first")
    read = read_text(text, model, open_checkpoint(model).spec.vocab_size)
    windows = calibration_windows(read, options["tokens"], between=options["between"])
    with shown_progress("windows", len(windows)) as show:
        sampled = samples(model, [window.tolist() for window in windows], show)
    with Console(stderr=True).status("fitting the codecs"):
        made = make(sampled)
    made.save(out)
    report = {
        "file": str(out),
        "hash": made.hash.hex(),
        "tokens": sum(map(len, windows)),
        "bytes": out.stat().st_size,
        "has_gradients": sampled.gradients is not None,
    }
    if ask.as_json:
        show_json(report)
        return
    weights = "gradients" if report["has_gradients"] else "queries and output weights"
    size, used = human_bytes(out.stat().st_size), human_count(sum(map(len, windows)))
    said = (("file", str(out)), ("size", size), ("hash", made.hash.hex()), ("tokens", used), ("weights", weights))
    ask.console.print(facts(said), soft_wrap=True)
