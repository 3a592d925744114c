"""Chat templates: sandboxed jinja2 that renders what transformers' `apply_chat_template` renders.

The environment repeats transformers' (`utils/chat_template_utils.py`): trimmed blocks, loop controls, `tojson` without
HTML escaping, `raise_exception`, `strftime_now`, the `{% generation %}` tag. What it adds is the trace (`traced.py`):
rendering tells for every character whether the template wrote it or a message brought it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from optune.data.traced import DATA, FIRST_MESSAGE, GENERATED, Traced, concat, find_origin, mark, plain, splice, trace
from optune.errors import DataError

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
CONTENT_FIELDS = ("content", "tool_calls", *REASONING_FIELDS)
"""The fields of a message that hold what was said; the others only describe it."""


class ChatTemplate:
    """A compiled chat template.

    `source` is jinja2 text, `name` its file for messages, `tokens` the named special tokens that the template may print
    (`bos_token`, `eos_token`, …). The date that `strftime_now` prints is `now`, or that of the moment when the template
    is compiled, so that one of them renders all rows alike; `prints_date` says whether the template may print it, and
    `date` is that day. Raises DataError where the text is no jinja2.

    A message's content may be a list of text parts. A template that takes no parts gets them joined.
    """

    def __init__(
        self, source: str, *, name: str, tokens: Mapping[str, str] | None = None, now: datetime | None = None
    ) -> None:
        self.name = name
        self.tokens = dict(tokens or {})
        self._source, self._now = source, now or datetime.now()
        self.date = self._now.date()
        self._takes_parts: dict[str, bool] = {}
        environment = _Environment(self._now)
        try:
            tree = environment.parse(source)
            self.literals = _find_literals(tree)
            self.prints_date = any(
                isinstance(call.node, jinja2.nodes.Name) and call.node.name == "strftime_now"
                for call in tree.find_all(jinja2.nodes.Call)
            )
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"not a chat template: {error.message}", where=f"{name}:{error.lineno}") from error
        # `~` joins through a function of jinja2's runtime that would lose the trace.
        self._template.root_render_func.__globals__["str_join"] = lambda parts: concat(map(str, parts))
        self.has_generation_tags = environment.saw_generation_tag

    @property
    def identity(self) -> list[str]:
        """What decides how a conversation is rendered."""
        return [self._source, self._now.isoformat() if "strftime_now" in self._source else ""]

    def __reduce__(self) -> tuple[Any, ...]:
        """Compiled anew where it arrives, with the date of here."""
        return partial(ChatTemplate, name=self.name, tokens=self.tokens, now=self._now), (self._source,)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Traced:
        """The conversation as one traced text. Raises DataError with the template's own words where it refuses."""
        return self._render([self._fit(message) for message in messages], tools, add_generation_prompt)

    def _fit(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message with its parts joined, unless the template takes parts from its role."""
        content, role = message.get("content"), message["role"]
        if not isinstance(content, list):
            return message
        if role not in self._takes_parts:
            self._takes_parts[role] = self._try_parts(role)
        return message if self._takes_parts[role] else {**message, "content": join_parts(content)}

    def _try_parts(self, role: str) -> bool:
        """Whether a part of `role` is rendered as the same text without a part is."""
        texts = []
        for content in ("probe", [{"type": "text", "text": "probe"}]):
            messages = [{"role": role, "content": content}]
            if role != "user":
                question = {"role": "user", "content": "question"}
                messages.insert(len(messages) if role in ("system", "developer") else 0, question)
            try:
                texts.append(plain(self._render(messages, None, False)))
            except DataError:
                return False
        return texts[0] == texts[1]

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool) -> Traced:
        try:
            text = self._template.render(
                **self.tokens,
                messages=[_trace_message(index, message) for index, message in enumerate(messages)],
                tools=trace(tools, DATA),
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # A template is a program of someone else's: anything may come out of it.
            raise DataError(_describe(error), hint=f"the template is {self.name}") from error
        return text if isinstance(text, Traced) else Traced(text)


def join_parts(content: Any) -> str:
    """The words of a message's content, given as text or in parts; empty where it has none."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""


def _trace_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers prepares it: empty keys dropped, older names of the reasoning filled in; then traced."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in REASONING_FIELDS if key in kept), None)
    if reasoning is not None:
        kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
    # The role stays plain: templates build control tokens out of it ('<|' + role + '|>'). formats.py checks it.
    return {
        key: value if key == "role" else trace(value, FIRST_MESSAGE + index if key in CONTENT_FIELDS else DATA)
        for key, value in kept.items()
    }


def _describe(error: Exception) -> str:
    if type(error) is jinja2.TemplateError:
        return f"the chat template refuses the conversation: {error}"
    line, traceback = None, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    place = f" on line {line}" if line else ""
    words = str(error).replace("optune.data.traced.Traced", "str")
    return f"the chat template fails{place}: {type(error).__name__}: {words}"


def _find_literals(tree: jinja2.nodes.Template) -> str:
    """All text that the template itself can write, parts separated by NUL."""
    parts = [node.data for node in tree.find_all(jinja2.nodes.TemplateData)]
    parts += [node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)]
    return "\0".join(parts)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` flags the characters that it encloses."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        self.environment.saw_generation_tag = True  # pyright: ignore[reportAttributeAccessIssue]
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_flag"), [], [], body).set_lineno(line)

    def _flag(self, caller: Callable[[], str]) -> str:
        return mark(caller(), GENERATED)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    concat = staticmethod(concat)  # pyright: ignore[reportAssignmentType]

    def __init__(self, now: datetime) -> None:
        self.saw_generation_tag = False
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.filters["join"] = _keep_trace(jinja2.filters.sync_do_join)
        self.filters["format"] = splice_format
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = now.strftime
        self.globals["dict"] = _DictMaker()
        self.globals["namespace"] = _Namespace

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        call = super().call
        if type(getattr(__obj, "__self__", None)) is not str or not args:
            return call(__context, __obj, *args, **kwargs)
        # A method of a plain string, such as `', '.join(names)`.
        listed = [list(value) if isinstance(value, Iterator) else value for value in args]
        return splice(lambda *values: call(__context, __obj, *values, **kwargs), *listed)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        method = super().wrap_str_format(value)
        if method is None:
            return None
        return lambda *args, **kwargs: splice(lambda first, rest: method(*first, **rest), args, kwargs)


def _keep_trace(join: Callable[..., str]) -> Callable[..., str]:
    @jinja2.pass_eval_context
    def traced_join(context: Any, value: Any, d: str = "", attribute: Any = None) -> str:
        return splice(lambda items: join(context, items, d, attribute), list(value))

    return traced_join


def splice_format(value: str, *args: Any, **kwargs: Any) -> str:
    """The `format` filter, `'%s and %s' | format(a, b)`, with the trace of its arguments."""
    return splice(lambda first, rest: str(value) % (rest or first), args, kwargs)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    origin = find_origin(value)
    return text if origin is None else Traced(text, ((len(text), origin),))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _DictMaker:
    """`dict(…)` without the class itself, whose attributes would open a way out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(…)` that takes no underscore names, which would reach the internals of Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for key in values:
            _check_name(key)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name with a leading underscore: {name!r}")
