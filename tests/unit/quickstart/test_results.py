from pathlib import Path

from lightning_dalle.quickstart.evaluation import read_curves


def write_log(logs: Path, attempt: int, text: str) -> None:
    (logs / f"version_{attempt}").mkdir(parents=True)
    (logs / f"version_{attempt}" / "metrics.csv").write_text(text)


def test_curves_of_attempts_are_joined_and_the_later_one_counts(tmp_path: Path) -> None:
    write_log(tmp_path, 2, "epoch,step,train/loss,val/loss\n0,20,2.0,\n0,30,1.0,\n")
    write_log(tmp_path, 10, "epoch,step,train/loss,val/loss\n0,30,0.5,\n0,30,,0.7\n")
    curves = read_curves(tmp_path)
    assert curves == {"train/loss": {20: 2.0, 30: 0.5}, "val/loss": {30: 0.7}}


def test_half_a_row_of_a_killed_attempt_is_left_out(tmp_path: Path) -> None:
    write_log(tmp_path, 0, "epoch,step,train/loss\n0,10,2.0\n0,20\n")
    assert read_curves(tmp_path) == {"train/loss": {10: 2.0}}


def test_no_logs_are_no_curves(tmp_path: Path) -> None:
    assert read_curves(tmp_path / "missing") == {}
