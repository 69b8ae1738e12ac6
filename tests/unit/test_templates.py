"""Go's templates as services use them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.templates import DEEPEST, expand

VALUES: dict[str, Any] = {
    "Service": {"ID": "s1", "Name": "web", "Labels": {"tier": "front", "a-b": "c"}},
    "Node": {"Hostname": "host1", "Platform": {"OS": "linux"}},
    "Task": {"Slot": "3"},
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("plain } text", "plain } text"),
        ("{{.Task.Slot}}", "3"),
        ("a-{{ .Service.Name }}-{{.Task.Slot}}-b", "a-web-3-b"),
        ("{{.Service.Labels.tier}}", "front"),
        ('{{index .Service.Labels "a-b"}}', "c"),
        ('{{index .Service.Labels "none"}}', ""),
        ("{{.Service.Labels}}", "map[a-b:c tier:front]"),
        ('{{"quoted }} \\"x\\" \\n"}}', 'quoted }} "x" \n'),
        ("{{`raw \\n`}}", "raw \\n"),
        ("{{/* a comment */}}x", "x"),
        ("a  {{- .Task.Slot -}}  b", "a3b"),
        ("a {{- /* gone */ -}} b", "ab"),
        ('{{join "," "a" "b" .Task.Slot}}', "a,b,3"),
        ('{{.Node.Hostname | printf "%s:%v" "x"}}', "x:host1"),
        ('{{printf "%q %d%%" "a" 7}}', '"a" 7%'),
        ('{{printf "%s"}}', "%!s(MISSING)"),
        ('{{if eq .Task.Slot "3"}}three{{else}}other{{end}}', "three"),
        ('{{if eq .Task.Slot "4"}}four{{else if eq .Node.Hostname "host1"}}one{{else}}x{{end}}', "one"),
        ('{{if ne .Task.Slot "3"}}x{{end}}y', "y"),
        ('{{if and .Task.Slot (not "")}}a{{end}}{{if or "" .Task.Slot}}b{{end}}', "ab"),
        ("{{range .Service.Labels}}<{{.}}>{{end}}", "<c><front>"),
        ("{{print 1 true}}", "1true"),
        ("{{len .Node.Hostname}}", "5"),
        ("{{eq 1 2 1}}", "true"),
        ("{{ (index .Service.Labels `tier`) | print }}", "front"),
        ("{{.}}", "map[Node:map[Hostname:host1 Platform:map[OS:linux]] "
         "Service:map[ID:s1 Labels:map[a-b:c tier:front] Name:web] Task:map[Slot:3]]"),
    ],
)  # fmt: skip
def test_expanded(text: str, expected: str) -> None:
    assert expand(text, VALUES) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{.Task.Wrong}}", "can't evaluate field Wrong"),
        ("{{.Task.Slot.Deeper}}", "can't evaluate field Deeper"),
        ("{{.Service.Labels.none}}", "can't evaluate field none"),
        ("{{", "unclosed action"),
        ("{{.Task.Slot", "unclosed action"),
        ("{{}}", "missing value"),
        ("{{nothing}}", 'function "nothing" not defined'),
        ("{{.Task.Slot .Task.Slot}}", "non-function"),
        ('{{"a" | "b"}}', "non-function"),
        ("{{end}}", "unexpected end"),
        ("{{else}}", "unexpected else"),
        ("{{if .Task.Slot}}x", "no {{end}}"),
        ("{{if .Task.Slot}}x{{else}}y{{else}}z{{end}}", "expected end"),
        ("{{with .Task}}x{{end}}", "with is not supported"),
        ("{{$x := 1}}", "unexpected '$x"),
        ("{{range .Task.Slot}}x{{end}}", "can't iterate"),
        ("{{(1}}", "unclosed parenthesis"),
        ("{{1)}}", "unexpected ')'"),
        ("{{index .Task.Slot `x`}}", "not a map"),
        ("{{len}}", "wrong arguments"),
        ("{{if .Task.Slot}}" * (DEEPEST + 2), "levels"),
        ("{{" + "(" * 100 + "1" + ")" * 100 + "}}", "levels"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidParameter, match="template: ") as caught:
        expand(text, VALUES)
    assert words in caught.value.message


def test_functions_and_the_limit() -> None:
    assert expand('{{secret "a"}}', {}, {"secret": lambda name: f"<{name}>"}) == "<a>"
    assert expand('{{"a" | secret}}', {}, {"secret": lambda name: f"<{name}>"}) == "<a>"
    with pytest.raises(InvalidParameter, match="more than"):
        expand("{{x}}{{x}}", {}, {"x": lambda: "x" * 600_000})


_PIECES = st.sampled_from(
    ["{{", "}}", "{{-", "-}}", ".Task.Slot", " ", "if ", "else", "end", "range ", '"', "`", "(", ")", "|", "index", "x"]
)


@given(st.lists(_PIECES | st.text(max_size=3), max_size=12).map("".join))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        result = expand(text, VALUES)
    except InvalidParameter as error:
        assert error.message
    else:
        assert "{{" in text or result == text


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="{")))
def test_text_without_actions_stays(text: str) -> None:
    assert expand(text, VALUES) == text
    assert expand(text + "{{.Task.Slot}}" + text, VALUES) == text + "3" + text
