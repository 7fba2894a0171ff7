"""Lines of a metrics file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from detrun.records.metrics_writer import (
    MetricsWriter,
    MetricValue,
    RankTaken,
    StepLine,
    encode,
    encode_supplement,
)


def test_a_line_is_as_the_contract_says() -> None:
    step = StepLine(
        step=7,
        metrics=[MetricValue("loss", "backward", 0x40966666, "float32")],
        microbatches=1,
        batch="xxh3:00",
        state={"parameters": "xxh3:01"},
        rng="xxh3:02",
    )
    assert encode(step) == (
        b'{"v":1,"step":7,"metrics":{"loss":{"bits":"0x40966666","dtype":"float32","value":4.7,"source":"backward"}},'
        b'"batch":"xxh3:00","microbatches":1,"state":{"parameters":"xxh3:01"},"rng":"xxh3:02"}\n'
    )


@pytest.mark.parametrize(
    ("bits", "dtype", "value"),
    [
        (0x7FC00000, "float32", "nan"),
        (0xFF800000, "float32", "-inf"),
        (0x7FF0000000000000, "float64", "inf"),
        (0x8000000000000000, "float64", -0.0),
        (0xFFFFFFFFFFFFFFFF, "int64", -1),
        (1, "bool", 1),
        (0x3E00, "float16", 1.5),
        (0x3DCD, "bfloat16", 0.1),
    ],
)
def test_values_that_json_has_no_word_for(bits: int, dtype: str, value: object) -> None:
    line = json.loads(encode_supplement(1, [MetricValue('a "name"', "record", bits, dtype)]))
    assert repr(line["metrics"]['a "name"']["value"]) == repr(value)


def test_the_better_source_keeps_the_plain_name() -> None:
    values = [
        MetricValue("loss", "backward", 1, "float32"),
        MetricValue("loss", "record", 2, "float32"),
        MetricValue("grad_norm", "clip_grad_norm_", 3, "float32"),
        MetricValue("grad_norm", "recorder", 4, "float64"),
    ]
    metrics = json.loads(encode(StepLine(1, values)))["metrics"]
    assert {name: metric["source"] for name, metric in metrics.items()} == {
        "loss": "record",
        "loss (backward)": "backward",
        "grad_norm": "clip_grad_norm_",
        "grad_norm (recorder)": "recorder",
    }


def test_a_second_process_of_a_rank_stays_out_and_leaves_a_note(tmp_path: Path) -> None:
    first = MetricsWriter(tmp_path, 0)
    with pytest.raises(RankTaken):
        MetricsWriter(tmp_path, 0)
    assert len(list((tmp_path / "metrics").glob("rank00000.conflict-*"))) == 1
    first.write(b"line\n")
    first.close()
    assert (tmp_path / "metrics" / "rank00000.jsonl").read_bytes() == b"line\n"


def test_a_process_that_the_rank_started_is_a_helper_and_no_rival(tmp_path: Path) -> None:
    first = MetricsWriter(tmp_path, 0)
    code = f"""
from pathlib import Path
from detrun.records.metrics_writer import MetricsWriter, RankTaken
try:
    MetricsWriter(Path({str(tmp_path)!r}), 0)
except RankTaken:
    print("taken")
"""
    # Through a shell: the rank is not always the parent.
    command = ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "taken\n"
    first.close()
    assert [path.name for path in (tmp_path / "metrics").iterdir()] == ["rank00000.jsonl"]
    assert len(list((tmp_path / "recorder").glob("rank00000.helper-*"))) == 1
