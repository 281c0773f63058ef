"""What `coterie generate` shows: figures for people, and the timeline as a file and as a picture."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.cli.common import note, table

if TYPE_CHECKING:
    from coterie.offloading.stats import OffloadStats
    from coterie.offloading.timeline import Timeline

_PAGES = (".html", ".htm")


@dataclass(frozen=True)
class TimelineFiles:
    """Where a timeline is to go.

    Attributes:
        trace: a Chrome trace; None: not wanted.
        picture: a page with the last token; None: not wanted.
    """

    trace: Path | None
    picture: Path | None

    def require(self) -> None:
        """Refuse files that cannot be written, and a picture that cannot be drawn, before the work.

        Raises:
            BackendUnavailable: without plotly.
            ConfigError: when a file cannot be written, or a picture's name is no page's.
        """
        from coterie.errors import ConfigError
        from coterie.files import replacing
        from coterie.report.page import graph_objects

        if self.picture is not None:
            if self.picture.suffix.lower() not in _PAGES:
                raise ConfigError(
                    f"--picture {self.picture} ends in {self.picture.suffix or 'nothing'}, and a page is written; name "
                    "it .html or .htm"
                )
            graph_objects()
        for path in (self.trace, self.picture):
            if path is not None:
                with suppress(_Tried), replacing(path):
                    raise _Tried  # leaves nothing behind

    def recorder(self) -> Timeline | None:
        """What to record with; None when nothing is wanted."""
        from coterie.offloading.timeline import Timeline

        return None if self.trace is None and self.picture is None else Timeline()

    def write(self, recorder: Timeline | None, store: Path, stats: OffloadStats) -> None:
        """Write what is wanted of what was recorded."""
        if recorder is not None and self.trace is not None:
            recorder.write(self.trace)
        if recorder is not None and self.picture is not None:
            _draw(recorder, self.picture, store, stats)


class _Tried(Exception):
    pass


def _draw(recorder: Timeline, picture: Path, store: Path, stats: OffloadStats) -> None:
    from coterie.report.token_timeline import token_page
    from coterie.units import format_bytes

    notes = [
        f"{store}, {format_bytes(stats.budget_bytes)} for experts, policy {stats.policy}, schedule {stats.schedule}. "
        f"Made with {', '.join(f'{name} {number}' for name, number in versions().items())}."
    ]
    if stats.emulated_bandwidth is not None:
        notes.append(f"Reads at an emulated {stats.emulated_bandwidth / 1e9:g} GB/s: times are an emulation's.")
    token_page(recorder.last_token(), notes).save(picture)


def versions() -> dict[str, str]:
    """What a result was made with."""
    from importlib.metadata import version

    import coterie

    return {"coterie": coterie.__version__, **{name: version(name) for name in ("torch", "transformers")}}


def show(result: dict[str, Any], stats: OffloadStats) -> None:
    """Print the figures of a run."""
    from coterie.units import format_bytes

    if stats.emulated_bandwidth is not None:
        note(f"an emulated disk of {stats.emulated_bandwidth / 1e9:g} GB/s: the times are an emulation's")
    if stats.use_cached or stats.skip_misses:
        note("which neurons run depends on what is resident: another budget or order may give another text")
    hidden, alone = (
        f"{share:.1%}" if stats.load_seconds > 0 else "-" for share in (stats.overlap, stats.attainable_overlap)
    )
    rows = [
        ["tokens per second, prompt included", f"{result['tokens_per_s']:.2f}"],
        ["memory of experts: most taken, budget", f"{format_bytes(stats.peak_expert_bytes)}, "
         f"{format_bytes(stats.budget_bytes)}"],
        ["expert uses that missed", f"{stats.miss_ratio:.1%}"],
        ["bytes read; share of reading every chosen expert", f"{format_bytes(stats.loaded_bytes)}; "
         f"{stats.bytes_share:.1%}"],
        ["time: loading, waiting for loads, computing experts", f"{stats.load_seconds:.2f} s, "
         f"{stats.exposed_seconds:.2f} s, {stats.compute_seconds:.2f} s"],
        ["share of the loading time that was hidden", hidden],
        ["  computing experts alone could hide (the rest hides too)", alone],
    ]  # fmt: skip
    table([f"policy {stats.policy}, schedule {stats.schedule}", ""], rows)
