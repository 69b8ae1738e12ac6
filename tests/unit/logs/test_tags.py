"""Templates of tags: names, functions, limits."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidParameter
from engine.logs.facts import Facts
from engine.logs.tags import FULL_ID, ID, LONGEST, render, validate

FACTS = Facts(
    id="0123456789abcdef" * 4,
    name="web",
    image_id="sha256:" + "fedcba9876543210" * 4,
    image_name="docker.io/library/busybox:1.36",
    path="/bin/sh",
    args=("-c", "sleep 1"),
    created=1_700_000_000_120_000_000,
    labels={"tier": "front", "com.example.a": "1"},
    environment=("PATH=/bin", "X=a b"),
    hostname="host1",
    log_path="/c/log",
)
OPTIONS = {"tag": "{{.ID}}", "labels": "tier"}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", ""),
        ("plain", "plain"),
        (ID, "0123456789ab"),
        (FULL_ID, FACTS.id),
        ("{{ .ID }}", "0123456789ab"),
        ("{{.Name}}/{{.FullID}}", f"web/{FACTS.id}"),
        ("{{.ImageID}}", "fedcba987654"),
        ("{{.ImageFullID}}", FACTS.image_id),
        ("{{.ImageName}} {{.ImageFullName}}", f"{FACTS.image_name} {FACTS.image_name}"),
        ("{{.Hostname}}", "host1"),
        ("{{.Command}}", "/bin/sh -c sleep 1"),
        ("{{.DaemonName}}/{{.ID}}", "docker/0123456789ab"),
        ("{{.ContainerName}}", "/web"),
        ("{{.ContainerID}}", FACTS.id),
        ("{{.ContainerEntrypoint}} {{.ContainerArgs}}", "/bin/sh [-c sleep 1]"),
        ("{{.ContainerImageID}}{{.ContainerImageName}}", FACTS.image_id + FACTS.image_name),
        ("{{.ContainerCreated}}", "2023-11-14 22:13:20.12 +0000 UTC"),
        ("{{.ContainerEnv}}", "[PATH=/bin X=a b]"),
        ("{{.ContainerLabels}}", "map[com.example.a:1 tier:front]"),
        ("{{.ContainerLabels.tier}}-{{.ContainerLabels.none}}", "front-"),
        ('{{index .ContainerLabels "com.example.a"}}{{index .ContainerLabels "no"}}', "1"),
        ("{{.LogPath}}", "/c/log"),
        ("{{.Config.labels}}", "tier"),
        ("{{json .Name}}", '"web"'),
        ("{{json .ContainerLabels}}", '{"com.example.a":"1","tier":"front"}'),
        ("{{json .ContainerArgs}}", '["-c","sleep 1"]'),
        ('{{with split .ImageName ":"}}{{join . "_"}}{{end}}-{{.ID}}', "docker.io/library/busybox_1.36-0123456789ab"),
        ('{{index (split .ImageName ":") 1}}', "1.36"),
        ('{{split .Name ""}}', "[w e b]"),
        ('{{join (split "a,b" ",") "-" | upper}}', "A-B"),
        ("{{title `a bC-d_e f.g`}}", "A BC-D_e F.G"),
        ("{{lower .Name | upper | lower}}", "web"),
        ("[{{pad .Name 1 2}}][{{pad `` 3 3}}]", "[ web  ][]"),
        ("{{truncate .FullID 5}}|{{truncate .Name 9}}|{{truncate `é` 1}}", "01234|web|"),
        ('{{printf "%s.%s" .Name .ID}}', "web.0123456789ab"),
        ('{{if eq .Name "web"}}yes{{else}}no{{end}}', "yes"),
        ('{{if index .ContainerLabels "x"}}x{{else if .Name}}{{.Name}}{{end}}', "web"),
        ("{{range .ContainerArgs}}<{{.}}>{{end}}", "<-c><sleep 1>"),
        ("{{with .ContainerLabels}}{{.tier}}{{$.Name}}{{end}}", "frontweb"),
        ("a {{- .Name -}} b", "awebb"),
        ("{{/* nothing */}}{{len .Name}}", "3"),
    ],
)
def test_rendered(template: str, expected: str) -> None:
    validate(template)
    assert render(template, FACTS, OPTIONS) == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{.Wrong}}", "can't evaluate field Wrong"),
        ("{{.id}}", "can't evaluate field id"),
        ("{{.ID", "unclosed action"),
        ("{{.ID}", "unclosed action"),
        ("{{nothing .ID}}", 'function "nothing" not defined'),
        ("{{.ID | nothing}}", 'function "nothing" not defined'),
        ("{{if .ID}}", "no {{end}}"),
        ("{{end}}", "unexpected end"),
        ("{{template `x`}}", "template is not supported"),
        ("{{$x := .ID}}", "unexpected"),
        ("{{}}", "missing value"),
        ("{{with .ID}}{{$.Wrong}}{{end}}", "can't evaluate field Wrong"),
    ],
)
def test_refused_without_a_container(template: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        validate(template)
    assert words in caught.value.message
    with pytest.raises(InvalidParameter):
        render(template, FACTS, {})


@pytest.mark.parametrize(
    "template",
    [
        "{{.ID.X}}", "{{index .ContainerArgs 7}}", "{{index .ID 0}}", "{{lower 3}}", "{{upper .ContainerArgs}}",
        "{{title true}}", "{{split .ID}}", "{{split .ID 1}}", "{{split .ContainerEnv `,`}}", "{{join .ID `,`}}",
        "{{join .ContainerArgs 1}}", "{{pad .ID -1 0}}", "{{pad .ID 1 99999999}}", "{{pad .ID `1` 0}}",
        "{{truncate .ID -1}}", "{{truncate 5 1}}", "{{truncate .ID true}}", "{{range .ID}}{{end}}",
        "{{json}}", "{{with .ID}}{{.Name}}{{end}}", "{{pad .ContainerArgs 1 1}}",
    ],
)  # fmt: skip
def test_refused_for_a_container(template: str) -> None:
    validate(template)
    with pytest.raises(InvalidParameter, match="template: "):
        render(template, FACTS, {})


def test_limits() -> None:
    assert render("x" * LONGEST, FACTS, {}) == "x" * LONGEST
    for template in ("x" * (LONGEST + 1), "{{pad .ID 4096 4096}}"):
        with pytest.raises(InvalidParameter, match="characters, more than 4096"):
            render(template, FACTS, {})
    nested = "{{range split .FullID ``}}"
    with pytest.raises(InvalidParameter, match="steps"):
        render(nested.replace(".FullID", "$.FullID") * 6 + "{{end}}" * 6, FACTS, {})


_WORDS = st.sampled_from((
    "{{", "}}", "{{-", "-}}", ".ID", ".Name", ".ContainerLabels", ".ContainerArgs", ".", "$", "$.ID", " ", "if ",
    "else", "end", "range ", "with ", '"', "`", "(", ")", "|", "index ", "split ", "join ", "pad ", "truncate ",
    "json ", "title ", "lower ", "1", "-1", "2", "{{end}}", "{{.ID}}", "{{range .ContainerArgs}}",
))  # fmt: skip


@given(st.lists(_WORDS | st.text(max_size=3), max_size=14).map("".join))
def test_any_template_is_rendered_or_refused(template: str) -> None:
    try:
        validate(template)
    except InvalidParameter as error:
        assert error.message
        # What is refused at create would be refused at start, unless its branch is not taken.
        return
    try:
        tag = render(template, FACTS, {})
    except InvalidParameter as error:
        assert error.message
    else:
        assert isinstance(tag, str) and len(tag) <= LONGEST


@given(st.dictionaries(st.text(min_size=1), st.text()), st.text(alphabet=st.characters(codec="utf-8")))
def test_labels_of_any_kind(labels: dict[str, str], name: str) -> None:
    facts = Facts(id="a" * 64, name=name, labels=labels)
    if len(name) <= LONGEST:
        assert render("{{.Name}}", facts, {}) == name
    text = render("{{json .ContainerLabels}}", facts, {})
    assert json.loads(text) == labels
