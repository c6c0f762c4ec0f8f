"""Markdown of a report."""

from collections.abc import Mapping
from typing import Any

from mlx_speculation.cli.measure import counted_texts, ratio_note

Measured = dict[str, Any]  # published fields of a command

FACTS = ("model", "weights", "date", "options", "load")
BUSY = (
    "A round with a draft took less time than a plain step, so other programs slowed "
    "some rounds or steps. Close other programs and run the report again."
)


def markdown(page: Measured) -> str:
    """Return the report in Markdown."""
    here = page["machine"]
    lines = [f"# mlx-speculation on {here['device_name'] or here['cpu']}", ""]
    if "stopped" in page:
        missing = ", ".join(name for name in _SECTIONS if name not in page)
        said = f"Partial: stopped in {page['stopped']}. Not measured: {missing}."
        lines += [f"**{said}**", ""]
    facts = {key: page[key] for key in FACTS if key in page} | here
    facts.pop("device_name")  # it is in the title
    lines += [f"- {key}: {value}" for key, value in facts.items()]
    lines.append("- " + ", ".join(f"{k} {v}" for k, v in page["versions"].items()))
    for name, write in _SECTIONS.items():
        if name in page:
            measured = page[name]
            error = measured.get("error")
            result = [f"not measured: {error}"] if error else write(measured)
            lines += ["", f"## {name}", "", *result]
    return "\n".join(lines) + "\n"


def _doctor(measured: Measured) -> list[str]:
    threads = measured["threads"]
    return [
        f"- BLAS: {measured['blas']}",
        *([f"- threads: {threads}"] if threads else []),
        *(f"- {each['level']}: {each['finding']}" for each in measured["advice"]),
    ]


def _check(measured: Measured) -> list[str]:
    rows, differs = measured["rows"], ""
    if rows["differing_rows"]:
        difference, margin = rows["largest_difference"], rows["tolerance"]
        differs = (
            f". Logits differ by up to {difference:.3g}; scores that are at most "
            f"{margin:.3g} apart are near-ties"
        )
    return [
        f"Drafts verified at once and token by token: {rows['verdict']}, "
        f"{rows['differing_rows']} of {rows['rows']} positions differ{differs}."
    ]


def _exact(measured: Measured) -> list[str]:
    result = measured["found"]
    price = result["exact_seconds"] / result["plain_seconds"]
    bits = "same bits" if measured["same"] else "BITS DIFFER"
    return [
        f"Exact mode: {bits} on this machine, {result['differing']} of "
        f"{result['rows']} tokens differ, in contexts of up to {result['context']} "
        f"positions. A forward of {measured['exact']} tokens takes {price:.2f} plain "
        "steps."
    ]


def _calibrate(measured: Measured) -> list[str]:
    costs = measured["seconds_by_context"]
    lengths = sorted({int(n) for table in costs.values() for n in table})
    lines = _header("context up to", *(str(n or "plain") for n in lengths))
    for context, table in costs.items():
        cells = [table.get(str(n)) for n in lengths]
        shown = ["-" if each is None else f"{each * 1e3:.1f}" for each in cells]
        lines.append(_row(str(context), *shown))
    title = "Milliseconds of a round by number of drafted tokens:"
    return [title, "", *lines, *(["", BUSY] if any(map(_busy, costs.values())) else [])]


def _busy(table: Mapping[str, float]) -> bool:
    return "0" in table and any(each < 0.95 * table["0"] for each in table.values())


def _benchmark(measured: Measured) -> list[str]:
    lines = _header("draft", "tokens/s", "x plain", "least", "most", "accepted")
    for arm in measured["arms"]:
        over, counts = arm["over_plain"], arm["statistics"]
        accepted = "-"
        if counts is not None and counts["drafted"]:
            accepted = f"{counts['accepted'] / counts['drafted']:.0%}"
        ratios = (over["median"], over["low"], over["high"])
        speeds = (f"{arm['speed']['median']:.1f}", *(f"{each:.2f}" for each in ratios))
        lines.append(_row(arm["name"], *speeds, accepted))
    texts = counted_texts(measured["texts"], chat=measured["chat"])
    same = "equal" if measured["same"] else "NOT ALL EQUAL"
    size = f"{texts}, answers of up to {measured['tokens']} tokens"
    note = ratio_note(measured["plain"])
    return [
        f"{size}; their texts are {same} to plain decoding's.",
        *("", *lines, "", note, "", measured["advice"]),
    ]


_SECTIONS = {
    "doctor": _doctor,
    "check": _check,
    "exact": _exact,
    "calibrate": _calibrate,
    "benchmark": _benchmark,
}


def _header(*cells: str) -> list[str]:
    return [_row(*cells), _row("---", *("---:" for _ in cells[1:]))]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
