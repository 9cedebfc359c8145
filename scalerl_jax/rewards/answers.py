"""What in a completion is the answer: behind the thinking, boxed, a number.

Pure functions of text. None executes it, and all are fast on any text.
"""

import fractions
import re

# Longer numbers are no answers: Python refuses to read integers beyond 4,300
# digits, and reading takes quadratic time before that.
_MAX_DIGITS = 1000
# Atomic: a number that runs into a letter is none, not even its first digits.
_NUMBER = re.compile(
  r"(?<![\w.)])(?>[-+]?(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?"
  r"|[-+]?\.\d+)(?!\w)"
)
_FRACTION = re.compile(r"(?<![\w.)/])(?>[-+]?\d+\s*/\s*\d+)(?![\w/])")
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def after_thinking(prompt: str, completion: str, end: str) -> str | None:
  """The part of a completion that a verifier may see.

  That is what stands behind the last `end`. Where it is missing, thinking that
  was opened is still going on: by the completion, or by a prompt that ends
  with the opening tag. What re-opens thinking and does not close it again has
  no answer either.

  Args:
    prompt: the text that the policy was given.
    completion: what it wrote.
    end: closes the thinking, as in `</think>`; `<think>` opens it then.

  Returns:
    The text; None where there is no answer.

  >>> after_thinking("2 + 2?", "<think>3? No.</think> 4", "</think>")
  ' 4'
  >>> after_thinking("2 + 2?", "<think>4", "</think>") is None
  True
  """
  begin = end.replace("</", "<", 1) if end.startswith("</") else ""
  _, found, tail = completion.rpartition(end)
  opened = bool(begin) and (
    begin in tail or (not found and prompt.rstrip().endswith(begin))
  )
  return None if opened else tail


def boxed(text: str) -> str | None:
  """The content of the last `\\boxed{...}`.

  Returns:
    Without the box; None where there is none or its braces do not close.

  >>> boxed(r"first \\boxed{1}, then \\boxed{\\frac{1}{2}}.")
  '\\\\frac{1}{2}'
  """
  start = max(text.rfind(r"\boxed{"), text.rfind(r"\fbox{"))
  if start < 0:
    return None
  start = text.index("{", start) + 1
  depth = 1
  for brace in re.finditer(r"(?<!\\)[{}]", text[start:]):
    depth += 1 if brace.group() == "{" else -1
    if not depth:
      return text[start : start + brace.start()].strip()
  return None


def last_number(text: str) -> str | None:
  """The last decimal number of a text, as it is written.

  A minus is a sign where it stands at the number and no operand stands at it.

  >>> last_number("5-3 is 2, not **-1,024.5**.")
  '-1,024.5'
  >>> last_number("7 - 3")
  '3'
  """
  found = [match.group() for match in _NUMBER.finditer(_plain(text))]
  return found[-1] if found else None


def number(text: str) -> fractions.Fraction | None:
  """The exact value of a decimal number or a fraction of integers.

  >>> number("1,024.50"), number("-1/2"), number("12 apples")
  (Fraction(2049, 2), Fraction(-1, 2), None)
  """
  text = _plain(text).strip()
  if len(text) > _MAX_DIGITS:
    return None
  if not _NUMBER.fullmatch(text) and not _FRACTION.fullmatch(text):
    return None
  try:
    return fractions.Fraction(re.sub(r"[\s,]", "", text))
  except ZeroDivisionError:
    return None


def stated_answer(text: str, *, like: str) -> str | None:
  """The answer that a text comes to, when one like `like` is asked for.

  Boxed or in `<answer>` tags where there is one; else, for a number, the last
  number (the last fraction for a fraction); else the last line.

  Args:
    text: what a verifier may see of a completion.
    like: the right answer; only its form counts.

  Returns:
    Without marks around it; None where there is none.

  >>> stated_answer("12 + 7 gives **19**.", like="4")
  '19'
  >>> stated_answer("Let me see.\\nblue", like="red")
  'blue'
  """
  tagged = _TAGGED.findall(text)
  marked = boxed(text) if tagged == [] else tagged[-1]
  if marked is not None:
    text = marked
  if number(like) is None:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines and "\n" not in like.strip() else text.strip()
  if "/" in like:
    fraction = _FRACTION.findall(_plain(text))
    return fraction[-1] if fraction else last_number(text)
  return last_number(text)


def final_answer(text: str) -> str:
  """The answer alone, where a data set has it behind a worked solution.

  Behind the last `####`, as in GSM8K, or in the last box, as in MATH; else
  the whole text.

  >>> final_answer("2 + 2 = 4 eggs.\\n#### 4"), final_answer("x > 3")
  ('4', 'x > 3')
  """
  _, found, tail = text.rpartition("####")
  if found and tail.strip():
    return tail.strip()
  content = boxed(text)
  return content if content else text


def code_block(text: str) -> str:
  """The last fenced block of Python; the whole text where there is none.

  >>> code_block("Like this:\\n```python\\nx = 1\\n```\\nDone.")
  'x = 1\\n'
  """
  blocks = _BLOCK.findall(text)
  return blocks[-1] if blocks else text


def _plain(text: str) -> str:
  """Typographic minus as a hyphen."""
  return text.replace("\u2212", "-").replace("\u2013", "-")
