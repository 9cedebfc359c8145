"""What of a completion is its answer."""

import fractions

import pytest

from scalerl_jax.rewards.answers import (
  after_thinking,
  boxed,
  last_number,
  number,
  stated_answer,
)


@pytest.mark.parametrize(
  ("prompt", "completion", "seen"),
  [
    ("q", "4", "4"),
    ("q", "<think>3</think>4", "4"),
    ("q", "3</think>4", "4"),  # opened by the template
    ("q<think>\n", "3</think>4", "4"),
    ("q<think>\n", "3, so 4", None),
    ("q", "<think>3, so 4", None),
    ("q", "<think>3</think>4<think>5", None),  # opened again, not closed
    ("q", "<think>3</think>4<think>5</think>6", "6"),
    ("What does <think> mean?", "a tag", "a tag"),
    ("q", "<think>3</think>", ""),
  ],
)
def test_thinking_is_never_seen(prompt, completion, seen):
  assert after_thinking(prompt, completion, "</think>") == seen


def test_another_mark_may_end_the_thinking():
  assert after_thinking("q", "1, 2 => 3", "=>") == " 3"
  assert after_thinking("q", "3", "=>") == "3"


@pytest.mark.parametrize(
  ("text", "content"),
  [
    (r"\boxed{4}", "4"),
    (r"\boxed{1} or \boxed{ 2 }", "2"),
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{\frac{1}{2}} is half", r"\frac{1}{2}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\frac{1}{2}", None),
    (r"\boxed{1} then \boxed{2", None),
    (r"\boxed 4", None),
    (r"\fbox{7}", "7"),
    ("4", None),
  ],
)
def test_the_last_box_counts(text, content):
  assert boxed(text) == content


@pytest.mark.parametrize(
  ("text", "found"),
  [
    ("It is 12.", "12"),
    ("1,234, that is all", "1,234"),
    ("1,234,567.", "1,234,567"),
    ("3, 4", "4"),
    ("5-3", "3"),
    ("(5)-3", "3"),
    ("= -3", "-3"),
    ("= \u22123", "-3"),
    ("**-3.50**", "-3.50"),
    ("$.5$", ".5"),
    ("12x", None),
    ("1.5x", None),
    ("x2", None),
    ("none", None),
    ("", None),
  ],
)
def test_last_number(text, found):
  assert last_number(text) == found


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("12", 12),
    (" -1,024.50 ", fractions.Fraction(-2049, 2)),
    ("+.5", fractions.Fraction(1, 2)),
    ("6 / 4", fractions.Fraction(3, 2)),
    ("1/0", None),
    ("1/2/3", None),
    ("12 apples", None),
    ("", None),
    ("9" * 1_000_000, None),
  ],
)
def test_number_is_exact_or_none(text, value):
  assert number(text) == value


@pytest.mark.parametrize(
  ("text", "like", "found"),
  [
    ("3 + 4 = 7.", "1", "7"),
    (r"7, thus \boxed{8}", "1", "8"),
    ("<answer>9</answer> of 10", "1", "9"),
    ("it is 1/2 or 3/4", "1/3", "3/4"),
    ("it is 2", "1/3", "2"),
    ("First\n\n  blue  \n", "red", "blue"),
    (r"blue \boxed{green}", "red", "green"),
    ("a\nb", "c\nd", "a\nb"),
    ("", "red", ""),
  ],
)
def test_what_a_text_comes_to(text, like, found):
  assert stated_answer(text, like=like) == found


@pytest.mark.parametrize(
  "text",
  ["9" * 10**6, "1," * 10**6, "{" * 10**6, "-" * 10**6, r"\boxed{" * 10**5],
)
def test_long_texts_are_read_at_once(text):
  # Quadratic time would take hours here.
  assert boxed(text) is None
  last_number(text)
  number(text)
