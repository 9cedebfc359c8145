"""The numbers of a study, from curves whose laws are known."""

import json

import numpy as np
import pytest

from experiments.studies import table
from experiments.studies.figure import draw
from experiments.studies.runner import Job
from experiments.studies.text import section_lines, study_lines
from scalerl_jax.config import Config
from scalerl_jax.run.metrics import AXES, CURVE_COLUMNS
from scalerl_jax.scaling import compare

# R_0, A, B, C_mid of each variant; every seed shifts A and nothing else.
LAWS = {
  "one": (0.15, 0.90, 2.0, 10.0),
  "near": (0.15, 0.91, 1.5, 12.0),  # A within the margin of `one`
  "far": (0.15, 0.70, 2.0, 10.0),
}
SHIFT = (0.0, 0.03, -0.03)


def _law(compute, initial, asymptote, exponent, midpoint):
  compute = np.maximum(compute, 1e-9)
  return initial + (asymptote - initial) / (
    1 + (midpoint / compute) ** exponent
  )


def _write(folder, curves):
  """`curve.csv` and `config.json` as a run leaves them."""
  folder.mkdir(parents=True)
  lines = [",".join(CURVE_COLUMNS)]
  for task, rates in curves.items():
    for step, rate in enumerate(rates):
      axes = [
        str(1e9 * step if name == "flops_full" else step) for name in AXES
      ]
      lines.append(
        ",".join([str(step), task, *axes, str(float(rate)), "768", "4"])
      )
  (folder / "curve.csv").write_text("\n".join(lines) + "\n")
  held = {"config": {}, "provenance": {"commit": "c0ffee"}}
  (folder / "config.json").write_text(json.dumps(held))


def _job(folder, variant, seed, curves):
  job = Job(variant, seed, Config(), folder / variant / f"seed_{seed}")
  _write(job.folder, curves)
  return job


def _study(folder, seeds, *, points=41, sets=("s",)):
  compute = np.arange(points)
  jobs = []
  for variant, (initial, asymptote, *shape) in LAWS.items():
    for seed in range(seeds):
      noise = np.random.default_rng(seed).normal(0, 0.002, points)
      noise[0] = 0.0
      a = asymptote + SHIFT[seed % 3]
      rates = _law(compute, initial, a, *shape) + noise
      jobs.append(_job(folder, variant, seed, dict.fromkeys(sets, rates)))
  return jobs


@pytest.fixture(scope="module")
def three(tmp_path_factory):
  """Fits of three seeds, and their one section."""
  jobs = _study(tmp_path_factory.mktemp("three"), 3)
  fits = table.fit_jobs(jobs, ["flops_full"])
  (section,) = table.tabulate(fits, list(LAWS))
  return fits, section


def test_means_over_seeds_are_those_of_the_laws(three):
  _, section = three
  assert section["reference"] == "one"
  assert list(section["variants"]) == list(LAWS)
  for name, (_, asymptote, exponent, midpoint) in LAWS.items():
    seeds = section["variants"][name]["seeds"]
    assert seeds["asymptote"]["mean"] == pytest.approx(asymptote, abs=0.01)
    assert seeds["exponent"]["mean"] == pytest.approx(exponent, rel=0.05)
    assert seeds["midpoint"]["mean"] == pytest.approx(1e9 * midpoint, rel=0.05)
    for found in seeds.values():
      assert found["count"] == 3
      assert found["kind"] == "t-interval over seeds"
      assert found["low"] < found["mean"] < found["high"]


def test_the_interval_is_over_seeds_not_of_a_fit(three):
  fits, section = three
  for name in LAWS:
    values = [f.value("asymptote") for f in fits if f.variant == name]
    expected = compare.seed_interval(values, 0.9)
    found = section["variants"][name]["seeds"]["asymptote"]
    np.testing.assert_allclose(
      (found["mean"], found["low"], found["high"]), expected[:3]
    )
    # Seeds differ by .03 and the fits are much surer than that.
    assert expected.high - expected.low > 0.05


def test_pairing_takes_out_what_seeds_share(three):
  _, section = three
  for name in ("near", "far"):
    paired = section["variants"][name]["paired"]
    expected = LAWS[name][1] - LAWS["one"][1]
    found = paired["asymptote"]
    assert found["mean"] == pytest.approx(expected, abs=0.01)
    assert found["low"] < expected + 0.01
    assert found["high"] - found["low"] < 0.03
    assert paired["midpoint"]["kind"] == "ratio"
    assert paired["midpoint"]["mean"] == pytest.approx(
      LAWS[name][3] / 10, rel=0.05
    )
    # Three pairs: no verdict, however clear it looks.
    assert {
      q: found["verdict"] for q, found in paired.items()
    } == dict.fromkeys(table.QUANTITIES)


def test_b_is_compared_at_one_asymptote_where_a_are_alike(three):
  fits, section = three
  same = section["variants"]["near"]["same_asymptote"]
  a = [
    section["variants"][name]["seeds"]["asymptote"]["mean"]
    for name in ("one", "near")
  ]
  assert same["asymptote"] == pytest.approx(np.mean(a))
  assert set(same["variants"]) == {"one", "near"}
  for name, found in same["variants"].items():
    expected = [
      compare.refit_exponent(
        f.compute,
        f.pass_rate,
        initial=f.fit.params.initial,
        asymptote=same["asymptote"],
      ).exponent
      for f in fits
      if f.variant == name
    ]
    assert found["exponents"] == expected
    assert found["exponent"] == pytest.approx(np.mean(expected))
    assert found["exponent"] == pytest.approx(LAWS[name][2], rel=0.15)
  assert section["variants"]["far"]["same_asymptote"] is None


def test_the_table_says_all_of_it(three):
  _, section = three
  text = "\n".join(section_lines(section))
  assert "against flops_full (FLOPs of all work asked for)" in text
  assert "A of these differ by less than 0.02" in text
  assert "near and one, A = 0.90" in text
  assert "far and one" not in text
  assert "With fewer than 6 pairs intervals only: no verdict" in text
  assert "unidentified" not in text
  one = next(line for line in text.splitlines() if line.startswith("one"))
  assert one.rstrip().endswith("3")
  assert "0.90" in one


def test_six_pairs_are_enough_for_a_verdict(tmp_path):
  fits = table.fit_jobs(_study(tmp_path, 6), ["flops_full"])
  (section,) = table.tabulate(fits, list(LAWS))
  far = section["variants"]["far"]["paired"]
  assert far["asymptote"]["count"] == 6
  assert far["asymptote"]["verdict"] == "lower"
  assert far["exponent"]["verdict"] in {"not told apart", "higher", "lower"}
  near = section["variants"]["near"]["paired"]
  assert near["midpoint"]["verdict"] == "higher"
  assert "no verdict" not in "\n".join(section_lines(section))


def test_one_seed_has_the_fits_own_interval_and_says_so(tmp_path):
  fits = table.fit_jobs(_study(tmp_path, 1), ["flops_full"])
  (section,) = table.tabulate(fits, list(LAWS))
  found = section["variants"]["one"]["seeds"]["asymptote"]
  fit = next(f.fit for f in fits if f.variant == "one")
  assert (found["low"], found["high"]) == fit.intervals(0.9)["asymptote"]
  assert found["kind"] == "one seed: the fit's own interval"
  lines = section_lines(section)
  assert any(line.startswith("* one seed") for line in lines)
  assert section["variants"]["far"]["paired"]["asymptote"]["low"] is None


def test_too_few_points_are_an_answer(tmp_path):
  jobs = _study(tmp_path, 2, points=4)
  fits = table.fit_jobs(jobs, ["flops_full"])
  (section,) = table.tabulate(fits, list(LAWS))
  text = "\n".join(section_lines(section))
  assert (
    "one, seed 0: A unidentified (too few points to fit: 4, where 6 are needed)"
    in text
  )
  row = section["variants"]["one"]["seeds"]
  assert row["asymptote"] is None
  assert row["end"]["count"] == 2
  draw(tmp_path / "figure.png", fits, list(LAWS), "few")
  assert (tmp_path / "figure.png").stat().st_size > 1000


def test_an_unidentified_seed_is_in_no_mean_and_is_named(tmp_path):
  compute = np.arange(41)
  good = _law(compute, *LAWS["one"])
  early = _law(compute, 0.15, 0.9, 2.0, 150.0)  # ends before its midpoint
  jobs = [
    _job(tmp_path, "one", seed, {"s": rates})
    for seed, rates in enumerate([good, early, good])
  ]
  jobs += [_job(tmp_path, "far", seed, {"s": good - 0.1}) for seed in range(3)]
  fits = table.fit_jobs(jobs, ["flops_full"])
  (section,) = table.tabulate(fits, ["one", "far"])
  rows = section["variants"]
  assert rows["one"]["seeds"]["asymptote"]["count"] == 2
  assert rows["one"]["seeds"]["asymptote"]["mean"] == pytest.approx(
    0.9, abs=0.01
  )
  assert rows["one"]["seeds"]["end"]["count"] == 3
  assert rows["far"]["paired"]["asymptote"]["count"] == 2
  assert not rows["one"]["runs"][1]["identified"]
  text = "\n".join(section_lines(section))
  assert "one, seed 1: A unidentified (the data end at" in text
  assert "3, A of 2" in text


def test_a_section_for_each_held_out_set_and_axis(tmp_path):
  jobs = _study(tmp_path, 2, sets=("s", "t"))
  only = _law(np.arange(41), *LAWS["far"])
  jobs += [_job(tmp_path, "alone", seed, {"t": only}) for seed in range(2)]
  fits = table.fit_jobs(jobs, ["flops_full", "step"])
  sections = table.tabulate(fits, ["alone", *LAWS])
  assert [(s["heldout"], s["axis"], s["reference"]) for s in sections] == [
    ("s", "flops_full", "one"),
    ("s", "step", "one"),
    ("t", "flops_full", "alone"),
    ("t", "step", "alone"),
  ]
  for section in sections:
    assert all(len(row["runs"]) == 2 for row in section["variants"].values())
  midpoint = sections[1]["variants"]["one"]["seeds"]["midpoint"]["mean"]
  assert midpoint == pytest.approx(10.0, rel=0.05)
  draw(tmp_path / "figure.png", fits, ["alone", *LAWS], "four panels")
  assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_record_is_json_and_the_text_names_what_is_missing(three):
  _, section = three
  record = {
    "study": "loss_type",
    "smoke": True,
    "note": "a note.",
    "seeds": [0, 1, 2],
    "missing": {"far, seed 2": "ValueError: no"},
    "sections": [section],
  }
  again = json.loads(json.dumps(record, allow_nan=False))
  lines = study_lines(again)
  assert lines == study_lines(record)
  assert lines[0] == "study loss_type, seeds 0, 1, 2"
  assert "missing: far, seed 2 (ValueError: no)" in lines
  assert "note: a note." in lines
  assert any(line.startswith("smoke:") for line in lines)


def test_runs_say_which_code_made_them(tmp_path):
  assert table.commits(_study(tmp_path, 1)) == ["c0ffee"]
