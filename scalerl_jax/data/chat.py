"""Chat templates: a conversation as the text that a model was tuned on.

Templates come with published checkpoints; they are run in Jinja's sandbox,
under the conventions that their authors wrote them for.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

# Templates that write the date get this one: prompts must be the same when a
# run is resumed on another day. It is the day that Llama's own falls back to.
TODAY = datetime.date(2024, 7, 26)


class ChatTemplate:
  """One template and the special tokens that it may name.

  >>> template = ChatTemplate(
  ...   "{% for m in messages %}{{ bos_token + m.role }}: {{ m.content }}\\n"
  ...   "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
  ...   {"bos_token": "<s>"},
  ... )
  >>> template.render([{"role": "user", "content": "Hi"}])
  '<s>user: Hi\\nassistant:'

  Reference: the conventions are those of Hugging Face's chat templates.
  """

  def __init__(self, source: str, special_tokens: Mapping[str, str]):
    """Compiles the template.

    Args:
      source: in Jinja.
      special_tokens: text by name, as in `{"bos_token": "<s>"}`.

    Raises:
      ValueError: `source` is not Jinja.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=[jinja2.ext.loopcontrols, _Generation],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    self._special_tokens = dict(special_tokens)
    try:
      self._template = environment.from_string(source)
    except jinja2.TemplateError as error:
      raise ValueError(
        f"a chat template must be valid Jinja, got {source[:60]!r} ({error});"
        " mend the checkpoint's chat_template.jinja"
      ) from error

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
  ) -> str:
    """The conversation as text.

    Args:
      messages: each with its "role" and "content", oldest first.
      add_generation_prompt: whether the text ends where the model is to speak.

    Raises:
      ValueError: the template fails on these messages, or refuses them.
    """
    try:
      return self._template.render(
        messages=[dict(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        tools=None,
        documents=None,
        **self._special_tokens,
      )
    except Exception as error:  # a template may fail in any way that code can
      roles = [message.get("role") for message in messages]
      raise ValueError(
        f"a chat template must accept messages of the roles {roles}, got"
        f" {type(error).__name__}: {error}; mend the template or change the"
        " messages"
      ) from error


class _Generation(jinja2.ext.Extension):
  """`{% generation %}` marks what a model said; the text stays as it is."""

  tags = {"generation"}  # noqa: RUF012 (as the base class has it)

  def parse(self, parser: Any) -> Any:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
  raise jinja2.TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
  """Not Jinja's own, which escapes for HTML."""
  return json.dumps(value, **{"ensure_ascii": False, **options})
