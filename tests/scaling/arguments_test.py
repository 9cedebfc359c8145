import pytest

from scalerl_jax.scaling import arguments


def test_flags_have_their_values_and_defaults():
  flags = arguments.parse(
    [
      *("--curve=a.csv,b.csv", "--forecast_at=1,2", "--forecast_at", "3e4"),
      *("--max_compute=5e3", "--level", ".5", "--series=x"),
    ]
  )
  assert vars(flags) == {
    "curve": "a.csv,b.csv",
    "forecast_at": ["1,2", "3e4"],
    "out": None,
    "compute_column": None,
    "pass_rate_column": None,
    "series": "x",
    "initial": None,
    "initial_sd": None,
    "min_compute": 0.0,
    "max_compute": 5000.0,
    "budget": None,
    "level": 0.5,
  }
  assert arguments.parse([]).forecast_at == []


@pytest.mark.parametrize(
  ("words", "sentence"),
  [
    (["a.csv"], "arguments must be flags, got 'a.csv'; write --curve=a.csv."),
    (["--cuve=a"], "there is no flag '--cuve=a'; did you mean --curve?"),
    (["--zz=1"], "there is no flag '--zz=1'; --help lists the flags."),
    (["--max=5"], "there is no flag '--max=5'; --help lists the flags."),
    (
      ["--initial=low"],
      "argument --initial: invalid float value: 'low'; --help lists the flags.",
    ),
    (
      ["--curve"],
      "argument --curve: expected one argument; --help lists the flags.",
    ),
  ],
)
def test_bad_arguments_are_one_sentence(words, sentence, capsys):
  with pytest.raises(ValueError, match="flag") as refused:
    arguments.parse(words)
  assert str(refused.value) == sentence
  assert capsys.readouterr() == ("", "")


def test_help_names_every_flag(capsys):
  with pytest.raises(SystemExit) as stopped:
    arguments.parse(["--help"])
  assert stopped.value.code == 0
  told = capsys.readouterr().out
  for name in vars(arguments.parse([])):
    assert f"--{name}" in told
