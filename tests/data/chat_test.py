"""Chat templates: the published conventions, the sandbox, one sentence."""

import pytest

from scalerl_jax.data.chat import ChatTemplate

USER = [{"role": "user", "content": "Hi <b> & é"}]


def render(source, messages=USER, **special):
  return ChatTemplate(source, special).render(messages)


@pytest.mark.parametrize(
  ("source", "text"),
  [
    # A block's line end and the spaces before it leave nothing behind.
    ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
    ("{{ bos_token }}{{ messages[0]['role'] }}", "<s>user"),
    ("{{ messages[0].content | tojson }}", '"Hi <b> & é"'),
    ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
    ("{% for n in [1, 2, 3] %}{{ n }}{% break %}{% endfor %}", "1"),
    ("{% generation %}said{% endgeneration %}!", "said!"),
    ("{% if tools %}tools{% else %}none{% endif %}", "none"),
    # The same on every day: a resumed run has the same prompts.
    ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
    ("{% if nothing is defined %}a{% else %}b{% endif %}", "b"),
  ],
)
def test_conventions(source, text):
  assert render(source, bos_token="<s>") == text


def test_generation_prompt_is_asked_for():
  template = ChatTemplate("{{ add_generation_prompt }}", {})
  assert template.render(USER) == "True"
  assert template.render(USER, add_generation_prompt=False) == "False"


def test_a_bad_template_is_one_sentence():
  with pytest.raises(ValueError, match=r"valid Jinja, got '\{% if' \("):
    ChatTemplate("{% if", {})


@pytest.mark.parametrize(
  ("source", "what"),
  [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages[0].content + 1 }}", "TypeError"),
    ("{{ messages[7].content }}", "UndefinedError"),
    ("{{ messages.append(1) }}", "SecurityError"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
  ],
)
def test_a_template_that_fails_is_one_sentence(source, what):
  with pytest.raises(ValueError, match=rf"roles \['user'\], got .*{what}"):
    render(source)


def test_a_template_cannot_change_the_messages():
  messages = [{"role": "user", "content": "Hi"}]
  with pytest.raises(ValueError, match="SecurityError"):
    render("{{ messages[0].update(role='x') }}", messages)
  assert messages == [{"role": "user", "content": "Hi"}]
