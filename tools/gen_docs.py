"""Writes the reference pages of deploy/docs from the code: `python tools/gen_docs.py [FOLDER]`.

Settings, metrics and errors come from their tables, commands from click, and the SDK from its
public names. A test compares the pages with a new rendering.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from tierd import client, errors
from tierd.cli.ctl import cli as tierctl
from tierd.cli.daemon import cli as tierd
from tierd.metrics import METRICS
from tierd.settings import SECTIONS, TIER_SECTIONS, Config, bounds

REFERENCE = Path(__file__).resolve().parent.parent / "deploy" / "docs" / "reference"
WIDTH = 98
SHARED = "tiers of every kind"
ADVICE = {
    errors.CallError: "Correct the call. The same call fails again.",
    errors.SetupError: "Correct the configuration or the machine.",
    errors.RetryError: "Try again later, or do without tierd for this request.",
    errors.OperatorError: "Tell an operator.",
}
"""The caller's action, for each branch of the tree of errors."""


def render() -> dict[str, str]:
    """Each page's text by its file name."""
    pages: Mapping[str, Callable[[], Iterator[str]]] = {
        "configuration.md": _configuration,
        "cli.md": _commands,
        "metrics.md": _metrics,
        "errors.md": _errors,
        "python-api.md": _python,
    }
    return {name: "\n".join(page()).rstrip() + "\n" for name, page in pages.items()}


def _head(title: str, source: str) -> Iterator[str]:
    yield f"<!-- Generated from {source} by tools/gen_docs.py. Run `make docs`; do not edit. -->"
    yield ""
    yield f"# {title}"
    yield ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(_cell(text) for text in row)} |" for row in rows)
    yield ""


def _cell(text: str) -> str:
    """The text on one line. Escapes bars, which would end the cell, and `<`, which HTML takes for a
    tag."""
    plain = re.sub(r"\s+", " ", text).replace("|", "\\|").strip()
    return "".join(
        part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(re.split("(`[^`]*`)", plain))
    )


# --- settings -----------------------------------------------------------------------------------


def _configuration() -> Iterator[str]:
    yield from _head("Configuration", "tierd/settings.py")
    yield "tierd reads one TOML file: `tierd serve --config FILE`, or the file that `TIERD_CONFIG` names."
    yield "Without a file the defaults hold. An unknown key is an error that names the nearest known one."
    yield "[reference.toml](../../../configs/reference.toml) is the same list as a file to copy from."
    yield ""
    yield "A size is a number of bytes or a text such as `512 MiB`. A duration is a number of seconds or a"
    yield "text such as `5 s`. A path is absolute. Sections of tiers are arrays: write `[[host]]` twice for"
    yield "two host tiers. Blocks spread over the tiers of one kind by their hash."
    yield ""
    yield "Settings marked *live* can change while the daemon runs: by"
    yield "[`tierctl set`](../how-to/change-settings.md), or by a changed file and SIGHUP."
    yield ""
    shared = _shared()
    for section in (*TIER_SECTIONS[1:], TIER_SECTIONS[0], *(name for name in SECTIONS if name not in TIER_SECTIONS)):
        is_array = section in TIER_SECTIONS
        yield f"## {section}"
        yield ""
        yield from _prose([f"`{f'[[{section}]]' if is_array else f'[{section}]'}`: {_meaning_of(section)}"])
        left = shared if is_array else ()
        yield from _settings(section, [name for name in _names(section) if name not in left])
        if is_array:
            yield f"And the settings of [{SHARED}](#{SHARED.replace(' ', '-')})."
            yield ""
        if section == TIER_SECTIONS[0]:
            yield f"## {SHARED.capitalize()}"
            yield ""
            yield "Each table of `[[device]]`, `[[host]]` and `[[nvme]]` takes these."
            yield ""
            yield from _settings(section, shared)


def _names(section: str) -> list[str]:
    return [field.name for field in dataclasses.fields(SECTIONS[section])]


def _field(section: str, name: str) -> Any:
    return SECTIONS[section].__pydantic_fields__[name]  # type: ignore[attr-defined]


def _shared() -> list[str]:
    """Settings that every kind of tier has with one meaning and one default."""
    first, *others = TIER_SECTIONS

    def said(section: str, name: str) -> tuple[str, Any] | None:
        return (_field(section, name).description, _field(section, name).default) if name in _names(section) else None

    return [name for name in _names(first) if all(said(first, name) == said(other, name) for other in others)]


def _meaning_of(section: str) -> str:
    text = SECTIONS[section].__doc__ or ""
    is_absent = section in TIER_SECTIONS and not getattr(Config(), section)
    return text + (" None by default." if is_absent and "None unless" not in text else "")


def _settings(section: str, names: Sequence[str]) -> Iterator[str]:
    rows = []
    for name in names:
        info = _field(section, name)
        default = info.get_default(call_default_factory=True)
        written = "{}" if isinstance(default, dict) else json.dumps(default)
        live = "; *live*" if info.json_schema_extra.get("live") else ""
        rows.append((f"`{name}`", f"`{written}`", _allowed(info) + live, info.description))
    yield from _table(("setting", "default", "value", "meaning"), rows)


def _allowed(info: Any) -> str:
    choices = getattr(info.annotation, "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices):
        return ", ".join(f"`{json.dumps(choice)}`" for choice in choices)
    unit = info.json_schema_extra["unit"] or ("true or false" if info.annotation is bool else "text")
    return ", ".join(filter(None, (str(unit), bounds(info))))


# --- commands -----------------------------------------------------------------------------------


def _commands() -> Iterator[str]:
    yield from _head("Commands", "the commands of tierd/cli")
    yield "`tierd` runs a daemon on this machine. `tierctl` asks a running daemon."
    yield ""
    codes = (
        ("0", "Success."),
        ("1", "Failed: the daemon refused, or a check did not hold."),
        ("2", "Usage: the command line is wrong."),
        ("3", "No daemon answers at the target."),
        ("130", "Ended by Ctrl-C."),
    )
    yield from _table(("exit code", "meaning"), codes)
    yield "Every verb of `tierctl` also takes `--target DIR`, the directory of the daemon's sockets, and"
    yield "`--json`, which prints raw numbers and whole hashes. Without `--target`, `TIERD_TARGET` counts."
    yield ""
    for name, program in (("tierd", tierd), ("tierctl", tierctl)):
        yield f"## {name}"
        yield ""
        leaves = list(_leaves(program, name, name))
        rows = [(f"[`{path}`](#{path.replace(' ', '-')})", _first(command)) for path, command in leaves]
        yield from _table(("command", ""), rows)
        for path, command in leaves:
            yield from _command(path, command)


def _leaves(command: click.Command, path: str, program: str) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    for name in command.list_commands(click.Context(command)):
        inner = command.get_command(click.Context(command), name)
        if inner is not None:
            yield from _leaves(inner, f"{path} {name}", program)


def _first(command: click.Command) -> str:
    return _paragraphs(command.help)[0]


def _paragraphs(text: str | None) -> list[str]:
    return [" ".join(part.split()) for part in inspect.cleandoc(text or "").split("\n\n")]


def _command(path: str, command: click.Command) -> Iterator[str]:
    yield f"### {path}"
    yield ""
    context = click.Context(command, info_name=path)
    yield "```text"
    yield " ".join([path, *command.collect_usage_pieces(context)])
    yield "```"
    yield ""
    yield from _prose(_paragraphs(command.help))
    options = [
        option for option in command.params if isinstance(option, click.Option) and option.name not in _EVERYWHERE
    ]
    if options:
        yield from _table(("option", "default", "meaning"), [_option(option, context) for option in options])


_EVERYWHERE = ("target", "as_json")


def _option(option: click.Option, context: click.Context) -> tuple[str, str, str]:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    default = option.get_default(context)
    is_plain = isinstance(default, str | int | float) and not isinstance(default, bool | enum.Enum)
    return f"{names}{_value_of(option)}", f"`{default}`" if is_plain and default != "" else "", option.help or ""


def _value_of(option: click.Option) -> str:
    """The value after the option's name: a word, choices, or a number and its range."""
    kind = option.type
    if option.is_flag:
        return ""
    if isinstance(kind, click.Choice):
        return f" {', '.join(f'`{choice}`' for choice in kind.choices)}"
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return f" {option.metavar or kind.name.upper()}"
    least = "" if kind.min is None else f", {'more than ' if kind.min_open else 'from '}{kind.min}"
    return f" NUMBER{least}{'' if kind.max is None else f' to {kind.max}'}"


def _prose(paragraphs: Sequence[str], *, width: int = WIDTH) -> Iterator[str]:
    """Wraps paragraphs; never breaks inside code."""
    for paragraph in paragraphs:
        line = ""
        for word in re.findall(r"(?:`[^`]*`|\S)+", paragraph):
            if line and len(line) + 1 + len(word) > width:
                yield line
                line = word
            else:
                line = f"{line} {word}".strip()
        yield line
        yield ""


# --- metrics and errors -------------------------------------------------------------------------


def _metrics() -> Iterator[str]:
    yield from _head("Metrics", "tierd/metrics.py")
    yield "The daemon serves them at `/metrics` for Prometheus once `server.metrics_listen` is set."
    yield "[Monitor](../how-to/monitor.md) shows which to watch. A tier is named as in `tierctl tiers`, such as"
    yield "`host.0`; a link is `nvme.0>host.0`."
    yield ""
    rows = [
        (f"`{name}`", row.kind, row.unit, ", ".join(f"`{label}`" for label in row.labels), row.meaning)
        for name, row in METRICS.items()
    ]
    yield from _table(("metric", "kind", "unit", "labels", "meaning"), rows)
    yield "Prometheus's own `tierd_process_*` metrics come with them: processor time, memory, descriptors."


def _errors() -> Iterator[str]:
    yield from _head("Errors", "tierd/errors.py")
    yield "Every error of the SDK is a class of `tierd.errors`. A miss, a refused put and a short prefix are"
    yield "results, not errors. With `best_effort=True` the SDK raises none of them: each is a miss."
    yield ""
    for branch, advice in ADVICE.items():
        yield f"## {branch.__name__}"
        yield ""
        yield advice
        yield ""
        leaves = [kind for kind in errors.GRPC_STATUS if issubclass(kind, branch)]
        rows = [(f"`{kind.__name__}`", f"`{errors.GRPC_STATUS[kind]}`", kind.__doc__ or "") for kind in leaves]
        yield from _table(("class", "gRPC status", "meaning"), rows)
    yield f"The name of the class travels in the trailing metadata `{errors.ERROR_KEY}`. An `Overloaded` that"
    yield f"knows when to try again has `{errors.RETRY_KEY}` beside it, in milliseconds."


# --- the SDK ------------------------------------------------------------------------------------


def _python() -> Iterator[str]:
    yield from _head("Python API", "the public names of tierd.client")
    yield "All names are importable from `tierd.client`. [Errors](errors.md) are in `tierd.errors`."
    yield ""
    names = sorted(client.__all__, key=lambda name: (name not in _FIRST, _FIRST.index(name) if name in _FIRST else 0))
    yield from _table(
        ("name", ""), [(f"[`{name}`](#{name.lower()})", _summary(getattr(client, name))) for name in names]
    )
    for name in names:
        yield from _public(name, getattr(client, name))


_FIRST = ("Client", "AsyncClient", "NamespaceSpec", "OpenedNamespace", "PutResult", "GetResult", "Lease", "Reservation")


def _summary(thing: Any) -> str:
    text = _paragraphs(thing.__doc__)[0]
    return re.split(r"(?<=[.])\s", text, maxsplit=1)[0]


def _public(name: str, thing: Any) -> Iterator[str]:
    yield f"## {name}"
    yield ""
    if dataclasses.is_dataclass(thing) or name in MADE_BY_CALLERS:
        yield from _code(_signature(name, _of_class(thing)))
    elif inspect.isfunction(thing):
        yield from _code(_signature(name, _of_source(thing)))
    yield from _prose(_paragraphs(thing.__doc__))
    if name.startswith("Async"):
        yield from _code([line for member, method in _found(thing).items() for line in _of_member(member, method)])
    elif inspect.isclass(thing):
        yield from _constants(thing)
        for member, method in _found(thing).items():
            yield f"### {name}.{member}"
            yield ""
            yield from _code(_of_member(member, method))
            yield from _prose(_paragraphs(inspect.getdoc(method)))


MADE_BY_CALLERS = ("Client", "AsyncClient")
"""Beside dataclasses. A caller gets a lease or a reservation from a verb."""


def _code(lines: Iterable[str]) -> Iterator[str]:
    yield "```python"
    yield from lines
    yield "```"
    yield ""


def _constants(owner: type) -> Iterator[str]:
    named = {name: value for name, value in vars(owner).items() if name.isupper() and isinstance(value, int)}
    if named:
        yield from _table(("name", "value"), [(f"`{name}`", str(int(value))) for name, value in named.items()])


def _found(owner: type) -> dict[str, Any]:
    """Methods and properties without underscores: the class's own in order, then those of its
    bases."""
    found: dict[str, Any] = {}
    for kind in owner.__mro__:
        if kind.__module__.startswith("tierd."):
            new = {name: thing for name, thing in vars(kind).items() if _is_method(name, thing)}
            found = found | {name: thing for name, thing in new.items() if name not in found}
    return found


def _is_method(name: str, thing: Any) -> bool:
    is_call = inspect.isfunction(thing) or isinstance(thing, classmethod | staticmethod | property)
    return not name.startswith("_") and is_call


def _of_member(name: str, thing: Any) -> Iterator[str]:
    if isinstance(thing, property):
        yield f"{name}: {inspect.unwrap(thing.fget).__annotations__['return']}"  # type: ignore[arg-type]
        return
    yield from _signature(name, _of_source(getattr(thing, "__func__", thing)))


class Signature(NamedTuple):
    """As the source has it: parameters without self, the return type, and whether it is async."""

    parameters: list[str]
    returns: str = ""
    is_awaited: bool = False


def _of_source(function: Callable[..., Any]) -> Signature:
    """Defaults are the source's text: a value could be this machine's."""
    node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    parts = node.args
    for group in (parts.posonlyargs, parts.args):
        group[:] = [argument for argument in group if argument.arg not in ("self", "cls")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return Signature(_split(ast.unparse(parts)), returns, isinstance(node, ast.AsyncFunctionDef))


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [_spaced(part.strip()) for part in parts if part.strip()]


def _spaced(parameter: str) -> str:
    return parameter.replace("=", " = ", 1) if ":" in parameter else parameter


def _of_class(owner: type) -> Signature:
    if not dataclasses.is_dataclass(owner):
        return Signature(_of_source(inspect.getattr_static(owner, "__init__")).parameters)
    return Signature([_of_field(field) for field in dataclasses.fields(owner)])


def _of_field(field: dataclasses.Field[Any]) -> str:
    has_factory = field.default_factory is not dataclasses.MISSING
    default = "..." if has_factory or dataclasses.is_dataclass(field.default) else repr(field.default)
    default = "bytes(32)" if field.default == bytes(32) else re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", default)
    has_default = has_factory or field.default is not dataclasses.MISSING
    return f"{field.name}: {field.type}" + (f" = {default}" if has_default else "")


def _signature(name: str, said: Signature) -> Iterator[str]:
    """A signature takes several lines if one is too long for the page."""
    word = "async " if said.is_awaited else ""
    line = f"{word}{name}({', '.join(said.parameters)}){said.returns}"
    if len(line) <= WIDTH:
        yield line
        return
    yield f"{word}{name}("
    yield from (f"    {part}," for part in said.parameters)
    yield f"){said.returns}"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else REFERENCE
    target.mkdir(parents=True, exist_ok=True)
    for file, page in render().items():
        (target / file).write_text(page, encoding="utf-8")
        print(target / file)
