"""Tables in JSON; a row that is `like` another row has only the differences."""

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(module: str) -> dict[str, Row]:
    """Read the table that lies beside a module and has its name."""
    text = Path(module).with_suffix(".json").read_text(encoding="utf-8")
    rows: dict[str, Row] = json.loads(text)
    return {name: _whole(rows, name) for name in rows}


def _whole(rows: dict[str, Row], name: str) -> Row:
    row = dict(rows[name])
    other = row.pop("like", None)
    return _merged(_whole(rows, other), row) if other else row


def _merged(old: Row, new: Row) -> Row:
    return old | {
        key: _merged(old[key], value)
        if isinstance(value, dict) and isinstance(old.get(key), dict)
        else value
        for key, value in new.items()
    }
