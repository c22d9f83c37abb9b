"""The command line. Commands are imported when they are run, so that `--help` is quick."""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from types import MappingProxyType
from typing import Any

import click

from stepgraph.errors import InputError
from stepgraph.version import VERSION

COMMANDS = MappingProxyType(
    {
        "predict": "step time, where it goes, MFU, warnings",
        "graph": "the op graph of a layer or a stage: text, DOT or a picture",
        "fuse": "fused against unfused, rule by rule, with reasons",
        "pipeline": "a pipeline schedule by itself: makespan, bubble, a picture",
        "flops": "parameters and FLOPs by family",
        "ops": "the op table and how software executes it",
        "targets": "the hardware targets and the source of every figure",
        "models": "the model configurations that are carried",
        "doctor": "what is installed and what is missing",
    }
)

EPILOG = """\b
Examples:
  stepgraph predict llama-3-8b --target h100
  stepgraph predict llama-3-70b --gpus 64 --tp 8 --pp 8 --global-batch 128
  stepgraph graph path/to/config.json --tp 2 -o layer.svg
"""


class Commands(click.Group):
    """A group that knows its commands by name and imports one when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"stepgraph.commands.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """One line per command, without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run as a program; also `--help` and `--version`, which no command sees, may meet a full disk."""
        try:
            try:
                return super().main(*args, **kwargs)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            _close_quietly()
            sys.exit(0)
        except OSError as failed:
            _say_unwritten(failed)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run; a refusal is printed problem by problem and ends with exit code 2.

        A reader that has seen enough (`| head`) is no error; a full disk is one.
        """
        _write_what_the_terminal_can_show()
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except InputError as refused:
            for problem in refused.problems:
                click.echo(f"error: {problem}", err=True)
            ctx.exit(2)
        except BrokenPipeError:
            _close_quietly()
            ctx.exit(0)
        except OSError as failed:
            _say_unwritten(failed)
            ctx.exit(1)
        return result


def _say_unwritten(failed: OSError) -> None:
    click.echo(f"error: the output could not be written: {failed.strerror or failed} [output]", err=True)
    _close_quietly()


def _close_quietly() -> None:
    """What is still buffered goes nowhere, or Python would complain of it when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write_what_the_terminal_can_show() -> None:
    """Characters that the output's encoding lacks become question marks instead of a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@click.command(
    cls=Commands,
    epilog=EPILOG,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(VERSION, prog_name="stepgraph")
def main() -> None:
    """Predict one training step of a transformer on a GPU cluster, operator by operator, and look inside."""
