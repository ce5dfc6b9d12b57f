"""What became of the rows of a file: read, kept, left out by reason, cut, and how many tokens that leaves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from slideformer.data.encode import Remark, Sample
from slideformer.data.formats import Reason

UNWANTED = (Remark.UNTERMINATED, Remark.UNMASKED)
MAX_LISTED = 8  # row numbers a line of the report names before it says how many more there are


@dataclass(slots=True)
class FileReport:
    """Counts of one file. Row numbers are line numbers, from 1. role: what the rows are for ("training", ...)."""

    path: str
    role: str
    rows_read: int = 0
    rows_kept: int = 0
    dropped: dict[Reason, list[int]] = field(default_factory=dict)
    remarks: dict[Remark, list[int]] = field(default_factory=dict)
    tokens: int = 0
    target_tokens: int = 0

    def lines(self) -> list[str]:
        """For people: one line of totals, then one for each thing that was left out or cut."""
        share = f" ({self.target_tokens / self.tokens:.0%})" if self.tokens else ""
        rows = f"{self.rows_kept:,} of {self.rows_read:,} rows for {self.role}"
        lines = [f"{self.path}: {rows}, {self.tokens:,} tokens, {self.target_tokens:,} supervised{share}"]
        lines += [f"  left out, {reason}: {_listed(rows)}" for reason, rows in self.dropped.items()]
        lines += [f"  {remark}: {_listed(rows)}" for remark, rows in self.remarks.items() if remark not in UNWANTED]
        return lines

    def warnings(self) -> list[str]:
        """What is allowed but hardly ever meant."""
        return [f"{self.path}: {r}: {_listed(rows)}" for r, rows in self.remarks.items() if r in UNWANTED]

    def count(self, sample: Sample, row_number: int) -> None:
        """Add one sample's tokens and remarks."""
        self.tokens += len(sample)
        self.target_tokens += sample.num_target_tokens
        for remark in sample.remarks:
            self.remarks.setdefault(remark, []).append(row_number)

    def as_dict(self) -> dict[str, object]:
        """For run.json."""
        return {
            "path": self.path,
            "role": self.role,
            "rows_read": self.rows_read,
            "rows_kept": self.rows_kept,
            "dropped": {str(reason): rows for reason, rows in self.dropped.items()},
            "remarks": {str(remark): rows for remark, rows in self.remarks.items()},
            "tokens": self.tokens,
            "supervised_tokens": self.target_tokens,
        }


def _listed(rows: Iterable[int]) -> str:
    numbers = list(rows)
    word = "row" if len(numbers) == 1 else "rows"
    more = f" and {len(numbers) - MAX_LISTED:,} more" if len(numbers) > MAX_LISTED else ""
    return f"{len(numbers):,} {word} ({', '.join(map(str, numbers[:MAX_LISTED]))}{more})"
