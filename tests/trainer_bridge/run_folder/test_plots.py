"""The plots of a run: curves, drawing and labels."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from envkit.trainer_bridge.run_folder.plots import Curve, curve_of, draw, learning_curve
from envkit.trainer_bridge.run_folder.record import RunRecord
from envkit.types import JSON


def size_of_png(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    return width, height


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_curve_leaves_out_what_is_missing_or_null_and_takes_the_later_of_two_rows() -> None:
    rows: list[dict[str, JSON]] = [
        {"step": 2, "kl": 0.5},
        {"step": 1, "kl": 1},
        {"step": 3, "kl": None},
        {"step": 4},
        {"step": 2, "kl": 0.25},
        {"kl": 9.0},
    ]
    assert curve_of(rows, "kl") == Curve((1, 2), (1.0, 0.25))


def test_a_run_gets_both_pictures_wide_enough_to_read(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path, "seed: 7", force=False)
    record.evaluation(0, {"eval_success": 0.1, "eval_greedy": 0.2})
    for step in range(1, 61):
        record.step(step, {"success": step / 60, "return": -1.0, "entropy_nats": 1 / step, "tokens_per_s": 5000.0})
    record.evaluation(60, {"eval_success": 0.9, "eval_greedy": 0.95})
    record.plots()
    record.close()

    assert names_in(tmp_path / "plots") == ["learning_curve.png", "training.png"]
    assert all(size_of_png(path)[0] >= 800 for path in (tmp_path / "plots").iterdir())


def test_a_run_without_numbers_gets_no_picture(tmp_path: Path) -> None:
    draw(tmp_path, [{"step": 1, "return": None}], [])
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_curves_that_coincide_can_all_be_seen(value: float) -> None:
    metrics: list[dict[str, JSON]] = [{"step": step, "success": value} for step in (1, 2)]
    held_out: list[dict[str, JSON]] = [{"step": step, "eval_success": value, "eval_greedy": value} for step in (0, 2)]
    figure = learning_curve(metrics, held_out)
    assert figure is not None
    training, sampled, greedy = figure.axes[0].lines
    assert training.get_linewidth() > sampled.get_linewidth()
    assert (sampled.is_dashed(), greedy.is_dashed()) == (False, True)
    assert greedy.get_markersize() > sampled.get_markersize()
    assert greedy.get_markerfacecolor() == "none"
