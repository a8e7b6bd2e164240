"""The error rates on the page about statistics are those of results/statistics.csv."""

from __future__ import annotations

import csv
from pathlib import Path

from icmixup.lab.comparison.verdict import WRONG_IF_EQUAL, WRONG_IF_UNSTABLE

ROOT = Path(__file__).parents[2]
KINDS = ("covered", "covered by Satterthwaite", "covered by seeds only")
NAMES = {"equal": "equal", "one better": "one 3 points better", "one point apart": "one point apart"}


def rates(simulation: str, measure: str, **fields: object) -> list[float]:
    """Percentages of the rows with these fields."""
    wanted = {name: str(value) for name, value in fields.items()} | {
        "simulation": simulation,
        "measure": measure,
    }
    with (ROOT / "results" / "statistics.csv").open(newline="") as file:
        return [float(row["percent"]) for row in csv.DictReader(file) if wanted.items() <= row.items()]


def percent(value: float) -> str:
    return f"{value:.1f}" if value < 10 or value > 90 else f"{value:.0f}"


def line(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def coverage_lines() -> list[str]:
    return [
        line(
            seeds,
            *(
                f"{min(found):.1f} to {max(found):.1f}"
                for found in (rates("coverage", k, seeds=seeds) for k in KINDS)
            ),
        )
        for seeds in (2, 3, 5, 10)
    ]


def found_lines() -> list[str]:
    return [
        line(
            seeds,
            f"{images:,}",
            *(
                percent(
                    *rates(
                        "best", "found", scenario="one better", seeds=seeds, images=images, seed_effect=effect
                    )
                )
                for effect in (0.3, 1.0)
            ),
        )
        for images in (1000, 10_000)
        for seeds in (3, 5, 10)
    ]


def auto_lines() -> list[str]:
    lines = []
    for scenario, name in NAMES.items():
        for images in (1000, 10_000):
            for effect in (0.3, 1.0):
                wrong, found, saved = (
                    rates("auto", measure, scenario=scenario, images=images, seed_effect=effect)[0]
                    for measure in ("wrong claim", "found", "runs saved")
                )
                shown = "" if scenario == "equal" else percent(found)
                lines.append(line(name, f"{images:,}", f"{effect:g}", percent(wrong), shown, percent(saved)))
    return lines


def wrong_claims(scenario: str) -> float:
    return max(rates("best", "wrong claim", scenario=scenario))


def summary() -> str:
    winner = max(rates("best", "sole winner", scenario="equal"))
    wrong = max(wrong_claims(scenario) for scenario in NAMES)
    thrice = wrong_claims("equal, one 3 times as unstable")
    tenfold = wrong_claims("equal, one 10 times as unstable")
    return (
        f"With eight equal methods, a sole winner was declared in {winner:.1f} % of trials (3 to "
        f"10 seeds). Any wrong claim about any pair was made in at most {wrong:.1f} %; in at most "
        f"{thrice:.1f} % if one method varies three times as much over seeds, and {tenfold:.1f} % if "
        "ten times."
    )


def expected() -> dict[str, str]:
    """The text of each part of the page that has numbers."""
    return {
        "COVERAGE": "\n".join(coverage_lines()),
        "SUMMARY": summary(),
        "FOUND": "\n".join(found_lines()),
        "AUTO": "\n".join(auto_lines()),
    }


def test_every_rate_on_the_page_is_computed_from_its_rows() -> None:
    page = " ".join((ROOT / "docs" / "statistics.md").read_text().split())
    for part, text in expected().items():
        assert " ".join(text.split()) in page, part


def test_the_rates_in_the_footnote_of_a_verdict_are_computed_from_their_rows() -> None:
    assert round(max(map(wrong_claims, NAMES)), 1) == WRONG_IF_EQUAL
    assert round(wrong_claims("equal, one 10 times as unstable"), 1) == WRONG_IF_UNSTABLE
