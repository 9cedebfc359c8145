"""Verifiers against hand-written completions, and against junk."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerl_jax.rewards.verifiers import (
  chain_answer,
  exact_match,
  stated_match,
)

CHAIN_WRONG = {
  "empty": "",
  "no marker": "a200",
  "marker alone": "a20=",
  "two markers": "a20==0",
  "answer, then a marker": "a20=0=0",
  "second marker right": "a20=1=0",
  "extra digit": "a20=00",
  "another digit": "a20=1",
  "packed symbol with the digit": "a20=+0",
  "space before": "a20= 0",
  "space after": "a20=0 ",
  "newline after": "a20=0\n",
  "padding symbol after": "a20=0.",
  "answer before the marker": "0=",
  "unknown piece": "a20=\ufffd",
}


@pytest.mark.parametrize("completion", ["a20=0", "=0", "junk+3:.=0"])
def test_chain_answer_reads_only_what_follows_the_marker(completion):
  assert chain_answer("0", completion, ended=True) is True


@pytest.mark.parametrize("name", CHAIN_WRONG)
def test_chain_answer_refuses_anything_but_the_digit(name):
  assert chain_answer("0", CHAIN_WRONG[name], ended=True) is False


@pytest.mark.parametrize("verifier", [chain_answer, exact_match])
def test_a_truncated_completion_is_wrong(verifier):
  assert verifier("0", "=0", ended=True) is True
  assert verifier("0", "=0", ended=False) is False


@pytest.mark.parametrize(
  "completion", ["12", " 12\n", "5 and 7 make = 12", "=12 "]
)
def test_exact_match_strips_and_takes_an_optional_marker(completion):
  assert exact_match("12", completion, ended=True) is True


@pytest.mark.parametrize(
  "completion", ["", "1 2", "012", "12.", "=", "12=13", "=13=12", "is 12"]
)
def test_exact_match_refuses_any_other_text(completion):
  assert exact_match("12", completion, ended=True) is False


def test_exact_match_takes_answers_with_a_marker_of_their_own():
  assert exact_match("x=3", "x=3", ended=True)
  assert exact_match("x=3", "so = x=3", ended=True)
  assert not exact_match("x=3", "3", ended=True)


@pytest.mark.parametrize("verifier", [chain_answer, exact_match])
@settings(max_examples=200, deadline=None)
@given(completion=st.text(), ended=st.booleans())
def test_no_completion_raises(verifier, completion, ended):
  correct = verifier("7", completion, ended=ended)
  assert isinstance(correct, bool)
  assert not correct or (ended and "7" in completion)


@pytest.mark.parametrize(
  ("answer", "text", "right"),
  [
    ("7", "3 + 4 = 7.", True),
    ("7", "3 + 4 = **7.0**", True),
    ("-1200", "It is -1,200", True),
    ("-1200", "It is 1,200", False),
    ("24", "24 / 6", False),
    ("4", "24 / 6", False),  # the question again is no answer
    ("4", r"\boxed{4} or 5", True),
    ("4", r"\boxed{5}, not 4", False),
    ("1/2", "It is 2/4", True),
    ("1/2", "0.5", True),
    ("007", "007", True),
    ("007", "7", False),  # zeros that count
    ("blue", "The colours mix.\n**blue**.", True),
    ("blue", "not blue", False),
    ("blue", "", False),
    ("7", "", False),
  ],
)
def test_stated_match(answer, text, right):
  assert stated_match(answer, text, ended=True) == right
  assert not stated_match(answer, text, ended=False)
