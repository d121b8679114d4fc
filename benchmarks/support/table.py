"""Lines of figures under their titles."""

from __future__ import annotations


class Table:
    """Columns are given as "title:format"; a cell that is None stays empty. Rows are printed as they come."""

    def __init__(self, *columns: str, name_width: int = 22) -> None:
        self._columns = [column.rpartition(":")[::2] for column in columns]
        self._name_width = name_width
        print(" " * name_width + "".join(f"{title:>{self._width(title)}s}" for title, _ in self._columns))

    def row(self, name: str, *cells: float | None, note: str = "") -> None:
        """Print one row and, behind it, a note."""
        texts = [
            f"{'' if cell is None else format(cell, how):>{self._width(title)}s}"
            for (title, how), cell in zip(self._columns, cells, strict=True)
        ]
        print(f"{name:{self._name_width}s}{''.join(texts)}  {note}".rstrip(), flush=True)

    @staticmethod
    def _width(title: str) -> int:
        return max(len(title) + 2, 8)


def claim(text: str, holds: bool) -> None:
    """Say whether a claim holds."""
    print(f"  {text}: {'holds' if holds else 'NO'}", flush=True)
