"""How tierd's programs end: exit codes, and one line with the reason.

Every expected failure becomes one line on stderr (thing, fault, remedy) and an exit code for
scripts. Errors carry their own messages. Only bugs of tierd print a traceback.
"""

from __future__ import annotations

import enum
import errno
import os
from typing import Any, NoReturn

import click

from tierd.cli.help import Listing
from tierd.errors import ConfigError, InvalidArgument, OperatorError, TierdError, Unavailable


class ExitCode(enum.IntEnum):
    """The results that scripts distinguish."""

    OK = 0
    FAILED = 1
    """The daemon refused, or a check failed."""
    USAGE = 2
    """The command line, a configuration, or a file that it names is wrong."""
    NO_DAEMON = 3
    """No daemon answers at the target."""


class Program(Listing):
    """A group of commands whose errors end as one line and an exit code."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Reads the options before the verb."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            end_misused(self.name or "tierd", error)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the requested command."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            end_misused(self.name or "tierd", error)
        except TierdError as error:
            end(self.name or "tierd", error)
        except UnicodeEncodeError as error:
            end(self.name or "tierd", InvalidArgument(f"arguments: {error.object!r} is not UTF-8; give UTF-8 text"))
        except OSError as error:
            if error.errno in (None, errno.EPIPE):  # click ends quietly if the reader closed the pipe
                raise
            where, whose = error.filename or ctx.invoked_subcommand, f"this process (uid {os.geteuid()})"
            end(
                self.name or "tierd",
                OperatorError(f"{where}: {error.strerror}; give {whose} a path that it may use"),
            )
        except KeyboardInterrupt:
            raise click.exceptions.Exit(130) from None


def end(program: str, error: TierdError) -> NoReturn:
    """Prints the error as one line on stderr, and ends the program with the error's code."""
    line = " ".join(str(error).split()) or type(error).__name__
    click.echo(f"{program}: {line}", err=True)
    raise click.exceptions.Exit(code_of(error)) from error


def end_misused(program: str, error: click.UsageError) -> NoReturn:
    """Prints what is wrong with the command line, and the help to see, as one line on stderr."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        raise error
    said = " ".join(error.format_message().split()).removesuffix(".")
    where = error.ctx.command_path if error.ctx is not None else program
    click.echo(f"{program}: {said[:1].lower()}{said[1:]}; see `{where} --help`", err=True)
    raise click.exceptions.Exit(ExitCode.USAGE) from error


def code_of(error: TierdError) -> ExitCode:
    """The exit code for an error."""
    if isinstance(error, Unavailable):
        return ExitCode.NO_DAEMON
    return ExitCode.USAGE if isinstance(error, InvalidArgument | ConfigError) else ExitCode.FAILED
