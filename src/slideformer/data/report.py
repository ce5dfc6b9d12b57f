"""What became of the rows of a dataset: read, kept, left out by reason, cut, and how many tokens that leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field

from slideformer.data.encode import REMARKS, Remark
from slideformer.data.formats import LAYOUTS
from slideformer.data.rows import Reason
from slideformer.data.workers import Chunk, Place

UNWANTED = (Remark.UNTERMINATED, Remark.UNMASKED, Remark.DATED)
MAX_SHOWN = 8  # rows that a line names before it says how many more there are
MAX_LISTED = 1000  # rows that are remembered by number; all are counted


@dataclass(slots=True)
class Tally:
    """How many rows, and which were the first of them, as FILE:NUMBER or, of a single file, NUMBER."""

    count: int = 0
    rows: list[str] = field(default_factory=list)

    def add(self, row: str) -> None:
        self.count += 1
        if len(self.rows) < MAX_LISTED:
            self.rows.append(row)

    def __str__(self) -> str:
        shown = self.rows[:MAX_SHOWN]
        more = f" and {self.count - len(shown):,} more" if self.count > len(shown) else ""
        return f"{self.count:,} {'row' if self.count == 1 else 'rows'} ({', '.join(shown)}{more})"


@dataclass(slots=True)
class FileReport:
    """Counts of one dataset. role: what the rows are for ("training", ...). first_unusable: quoted if none is usable.

    tokens, target_tokens: of all samples. cut_tokens: what max_length took away. held_out: samples that val_size took.
    num_packs: rows after packing, or 0; pack_share: how full they are.
    """

    path: str
    role: str
    rows_read: int = 0
    rows_kept: int = 0
    samples: int = 0
    dropped: dict[Reason, Tally] = field(default_factory=dict)
    remarks: dict[Remark, Tally] = field(default_factory=dict)
    tokens: int = 0
    target_tokens: int = 0
    cut_tokens: int = 0
    first_unusable: str = ""
    num_packs: int = 0
    pack_share: float = 0.0
    held_out: int = 0
    files: int = 1
    passed_over: list[str] = field(default_factory=list)
    streamed: bool = False

    def lines(self) -> list[str]:
        """For people: one line of totals, then one for each thing that was left out or cut."""
        share = f" ({self.target_tokens / self.tokens:.0%})" if self.tokens else ""
        so_far = " so far, streaming," if self.streamed else ""
        rows = f"{self.rows_kept:,} of {self.rows_read:,} rows{so_far} for {self.role}"
        if self.samples != self.rows_kept:
            rows += f" as {self.samples:,} samples"
        lines = [f"{self.path}: {rows}, {self.tokens:,} tokens, {self.target_tokens:,} supervised{share}"]
        lines += [f"  left out, {reason}: {tally}" for reason, tally in self.dropped.items()]
        for remark, tally in self._remarks(wanted=True):
            cut = f", {self.cut_tokens:,} tokens" if remark is Remark.TRUNCATED else ""
            lines.append(f"  {REMARKS[remark]}: {tally}{cut}")
        if self.held_out:
            lines.append(f"  held out for evaluation: {self.held_out:,} samples")
        if self.num_packs:
            lines.append(f"  packed into {self.num_packs:,} rows, {self.pack_share:.0%} full")
        if self.passed_over:
            shown = ", ".join(self.passed_over[:MAX_SHOWN])
            more = f" and {len(self.passed_over) - MAX_SHOWN} more" if len(self.passed_over) > MAX_SHOWN else ""
            lines.append(f"  {self.files} files read, passed over: {shown}{more}")
        return lines

    def warnings(self) -> list[str]:
        """What is allowed but hardly ever meant."""
        return [f"{self.path}: {REMARKS[remark]}: {tally}" for remark, tally in self._remarks(wanted=False)]

    def as_dict(self) -> dict[str, object]:
        """For run.json and --json. Rows are listed up to MAX_LISTED of a kind."""
        return {
            "path": self.path,
            "role": self.role,
            "rows_read": self.rows_read,
            "rows_kept": self.rows_kept,
            "samples": self.samples,
            "dropped": {str(reason): asdict(tally) for reason, tally in self.dropped.items()},
            "remarks": {REMARKS[remark]: asdict(tally) for remark, tally in self.remarks.items()},
            "tokens": self.tokens,
            "supervised_tokens": self.target_tokens,
            "cut_tokens": self.cut_tokens,
            "held_out": self.held_out,
            "packs": self.num_packs,
            "streamed": self.streamed,
        }

    def add(self, chunk: Chunk) -> None:
        """Count what became of some rows."""
        self.rows_read += chunk.rows_read
        self.rows_kept += chunk.rows_kept
        self.samples += len(chunk.samples)
        self.first_unusable = self.first_unusable or chunk.first_unusable
        for sample in chunk.samples:
            self.tokens += len(sample.input_ids)
            self.target_tokens += sample.num_target_tokens
            self.cut_tokens += sample.num_cut
        for reason, place in chunk.dropped:
            self.dropped.setdefault(reason, Tally()).add(self._row(place))
        for remark, place in chunk.remarked():
            self.remarks.setdefault(remark, Tally()).add(self._row(place))

    def clear(self) -> None:
        """Forget what `add` has counted."""
        self.restore(FileReport(self.path, self.role).counts())

    def nothing_usable(self) -> str:
        """The sentence for a dataset of which no row can be used."""
        why = f"the first is {self.first_unusable}" if self.first_unusable else "it has none"
        return f"no row of {self.path} can be used, of {self.rows_read}: {why}; expected {LAYOUTS}"

    def _row(self, place: Place) -> str:
        name, number = place
        return str(number) if self.files == 1 else f"{name}:{number}"

    def restore(self, counts: Mapping[str, object]) -> None:
        """Take the counts that `counts` gave."""
        for name in ("rows_read", "rows_kept", "samples", "tokens", "target_tokens", "cut_tokens", "first_unusable"):
            setattr(self, name, counts[name])
        self.dropped = {Reason(name): Tally(**tally) for name, tally in counts["dropped"].items()}
        self.remarks = {Remark(int(value)): Tally(**tally) for value, tally in counts["remarks"].items()}

    def counts(self) -> dict[str, object]:
        """All that follows from the rows, as JSON."""
        return {
            **{name: getattr(self, name) for name in ("rows_read", "rows_kept", "samples", "tokens")},
            **{name: getattr(self, name) for name in ("target_tokens", "cut_tokens", "first_unusable")},
            "dropped": {str(reason): asdict(tally) for reason, tally in self.dropped.items()},
            "remarks": {str(int(remark)): asdict(tally) for remark, tally in self.remarks.items()},
        }

    def _remarks(self, *, wanted: bool) -> Iterator[tuple[Remark, Tally]]:
        return ((r, tally) for r, tally in self.remarks.items() if (r not in UNWANTED) == wanted)
