"""The `streamrt` command.  typer and rich are imported here and in the demo, never by `import transport`."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from streamrt.errors import StreamrtError

LOOK_SECONDS = 3.0  # for a worker to answer who is to show what it is

app = typer.Typer(no_args_is_help=True, add_completion=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        from transport.information import version_of_streamrt

        typer.echo(f"streamrt {version_of_streamrt()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Device buffers between processes, in stream order."""


@app.command()
def demo(
    device: Annotated[str, typer.Option(help="auto (GPUs where there are some), host (or cpu) or cuda")] = "auto",
    frames: Annotated[int, typer.Option(min=1, help="frames to run through the pipeline")] = 24,
    stages: Annotated[
        str | None,
        typer.Option(
            help="libraries of the three stages: numpy or cupy, torch, jax",
            show_default="numpy,numpy,numpy on the host, cupy,cupy,cupy on GPUs",
        ),
    ] = None,
    in_flight: Annotated[int, typer.Option(min=1, help="frames between source and consumer, at most")] = 8,
    megapixels: Annotated[
        float | None,
        typer.Option(min=0.01, max=200.0, help="size of a frame", show_default="4 on the host, 24 on GPUs"),
    ] = None,
    output: Annotated[Path, typer.Option(help="folder for the two pictures")] = Path("demo-output"),
    json: Annotated[Path | None, typer.Option(help="write the figures to this file too")] = None,
    kill: Annotated[
        bool,
        typer.Option(
            "--kill", help="kill a worker in the middle of a frame, and go on with the next one; draws no pictures"
        ),
    ] = False,
) -> None:
    """Run a pipeline of three worker processes over photographs, check every output, and show where the time went."""
    from transport.launch.environment import set_up_process

    set_up_process()  # before JAX is imported: it would take most of a GPU from the workers
    from transport.demo.plan import make_plan

    console = Console()
    try:
        plan = make_plan(device, frames, stages, in_flight, megapixels, output, kill)
        from transport.demo.main import run, run_kill  # which draws, and needs what a plan has looked for

        if kill:
            passed = run_kill(plan, console, json)
        else:
            _make_folder(output)  # said now, not after the run
            passed = run(plan, console, json)
    except (StreamrtError, typer.BadParameter) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None
    if not passed:
        raise typer.Exit(1)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"--output {folder}: {error.strerror}; name a folder that can be written") from error


@app.command()
def info(
    peer: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Show a worker, and how arrays go to it.")] = None,
) -> None:
    """Show versions, array libraries, backends and devices; with --peer, a running worker."""
    from transport.information import PACKAGES, devices, versions

    table = Table(show_header=False)
    table.add_column(style="bold")
    if peer is not None:
        try:
            rows = _about(peer)
        except StreamrtError as error:
            Console().print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
            raise typer.Exit(2) from None
        for name, value in rows:
            table.add_row(name, escape(value))
        Console().print(table)
        return
    found = versions()
    table.add_row("streamrt", found["streamrt"])
    table.add_row("python", f"{found['python']} on {platform.platform(terse=True)}")
    for name in PACKAGES:
        table.add_row(name, found.get(name, "[dim]not installed[/]"))
    table.add_row("devices", "\n".join(devices()))
    Console().print(table)


def _about(address: str) -> list[tuple[str, str]]:
    """What a worker says of itself, and by which channel arrays of each device go to it.  Blocks the host, to connect.

    Raises `PeerLostError`, `DeadlineError` where nobody answers, `AddressError`.
    """
    from transport.peer import connect

    with connect(address, timeout=LOOK_SECONDS) as peer:
        functions = ", ".join(peer.functions) or "none"
        goes = [f"{local} -> {peer.device_map[local]}: {channel}" for local, channel in peer.channels().items()]
        return [
            ("worker", peer.name),
            ("address", address),
            ("process", str(peer.pid)),
            ("functions", functions),
            ("arrays", "\n".join(goes) or "of no device"),
            ("order", peer.order),
        ]


def main() -> None:
    """The entry point of the console script.  Blocks the host until the command is done."""
    app()


if __name__ == "__main__":
    main()
